"""The command line: what each command prints, its JSON, its exit codes, its errors of one line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer

import lowbit
from lowbit.command import EXAMPLES, app, run
from lowbit.command.console import Lines


def parsed(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """The JSON that a command prints; it must succeed and print nothing else."""
    assert run([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def failed(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """The one line that a command leaves on stderr as it fails with ``code``."""
    assert run([*map(str, arguments)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("lowbit: error: ")
    return lines[0]


# ---- commands --------------------------------------------------------------------------------------------------------


def test_plan(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = parsed(capsys, "plan", model, "-r", "int4_g32", "--device", "cpu")
    expected = lowbit.plan(transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto"), "int4_g32")
    assert found == json.loads(json.dumps(expected.to_dict()))
    assert run(["plan", str(model), "-r", "int8"]) == 0
    assert "7 of 9 layers quantized" in capsys.readouterr().out


def test_quantize_then_load(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    found = parsed(capsys, "quantize", model, "--recipe", "int4_g32", "-o", out)
    assert found["file_bytes"] == (out / "model.safetensors").stat().st_size
    assert sum(layer["config"] is not None for layer in found["plan"]["layers"]) == 7

    expected = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    lowbit.quantize_(expected, "int4_g32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer("w1 w2 w3 A", return_tensors="pt")["input_ids"]
    assert ids.tolist() == [[2, 3, 4, 41]]
    with torch.no_grad():
        assert torch.equal(lowbit.load(out)(ids).logits, expected(ids).logits)

    assert run(["quantize", str(model), "-r", "int8", "-o", str(out)]) == 0  # what lowbit wrote it may replace
    said = capsys.readouterr().out
    assert "7 of 9 layers quantized" in said
    assert "loss not measured: --calibration FILE" in said


def test_quantize_on_a_text(model: Path, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, recipe = material / "text.txt", "int8_static_activation_int8_weight"
    found = parsed(capsys, "quantize", model, "-r", recipe, "-o", tmp_path, "--calibration", text, "--rows", 3, "--length", 16)
    assert all(layer["loss"] > 0 for layer in found["plan"]["layers"] if layer["config"] is not None)
    expected = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    lowbit.quantize_(expected, recipe, calibration=lowbit.Calibration(text, rows=3, length=16))
    scale = expected.model.layers[0].mlp.up_proj.input_scale
    loaded = lowbit.load(tmp_path)
    assert torch.equal(loaded.model.layers[0].mlp.up_proj.input_scale, scale)
    ids = torch.tensor([[2, 3, 4, 41]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected(ids).logits)
    again = ["quantize", str(model), "-r", recipe, "-o", str(tmp_path), "--calibration", str(text), "--length", "16"]
    assert run(again) == 0
    assert "loss of 7 layers, squared error of outputs over their square: median " in capsys.readouterr().out
    line = failed(capsys, 2, "quantize", model, "-r", recipe, "-o", tmp_path)
    assert "a static activation_scale looks at data: give a text with --calibration FILE" in line
    assert "no text file" in failed(capsys, 2, "quantize", model, "-o", tmp_path, "--calibration", tmp_path / "none.txt")


def test_inspect(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantized = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    carried = lowbit.quantize_(quantized, {"*mlp*": "mxfp4", "*": "int8_dynamic_activation_int8_weight"})
    lowbit.save(quantized, tmp_path)
    found = parsed(capsys, "inspect", tmp_path)
    bits = {layer["name"]: layer["bits_per_weight"] for layer in found["layers"]}
    assert bits == pytest.approx({layer.name: layer.bits_per_weight for layer in carried.quantized})
    assert found["quantized_bytes"] == sum(layer["bytes"] for layer in found["layers"])
    assert sum(found["files"].values()) > found["quantized_bytes"] + found["other_bytes"]
    assert parsed(capsys, "inspect", tmp_path / "model.safetensors")["layers"] == found["layers"]
    assert run(["inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "fp4_e2m1:g32:e8m0" in printed
    assert "x int8:row:fp32" in printed
    assert "7 quantized layers" in printed


def test_inspect_tells_a_header_that_its_tensors_contradict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantized = torch.nn.Sequential(torch.nn.Linear(64, 8))
    lowbit.quantize_(quantized, "int8")
    lowbit.save(quantized, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'\\"shape\\":[8,64]', b'\\"shape\\":[8,32]'))
    assert "0.weight is uint8 [8, 64, 1], and the header says uint8 [8, 32, 1]" in failed(capsys, 1, "inspect", tmp_path)


def test_eval(model: Path, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", model, "--data", material, "--text", material / "text.txt", "--limit", 5, "--context", 32]
    report = tmp_path / "report.json"
    found = parsed(capsys, *arguments, "--recipes", "int8,int3_g32", "--shots", 2, "--report", report)
    assert json.loads(report.read_text()) == found
    assert [outcome["recipe"] for outcome in found["outcomes"]] == ["float", "int8", "int3_g32"]
    assert {outcome["tasks"]["mmlu"]["n"] for outcome in found["outcomes"]} == {5}
    assert found["outcomes"][0]["tasks"]["mmlu"]["difference"] is None
    assert found["outcomes"][2]["tasks"]["mmlu"]["difference"]["n"] == 5
    assert run([*map(str, arguments), "-r", "nf4"]) == 0
    assert "nf4" in capsys.readouterr().out


def test_speeds_stand_beside_accuracies(
    model: Path, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowbit.evals.gemv._USUAL", (512, 512))
    arguments = ["eval", model, "--data", material, "--tasks", "mmlu", "--limit", 1, "--speed"]
    found = parsed(capsys, *arguments, "--recipes", "int8_g64", "--out", tmp_path / "out")
    assert [(row["scheme"], row["m"], row["n"], row["k"]) for row in found["gemv"]["rows"]] == [
        ("float", 1, 512, 512),
        ("int8_g64", 1, 512, 512),
    ]
    assert all(row["limit_us"] > 0 and row["fraction_of_limit"] > 0 for row in found["gemv"]["rows"])
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "M = 1, 512 x 512: cpu" in page
    assert "Not measured: weights loaded" not in page


def test_eval_of_a_quantized_folder(model: Path, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parsed(capsys, "quantize", model, "-r", "int4_g32", "-o", tmp_path / "out")
    where = ["--data", material, "--text", material / "text.txt", "--chunks", 2, "--context", 16]
    (only,) = parsed(capsys, "eval", tmp_path / "out", "--recipes", "", *where)["outcomes"]
    assert only["recipe"] == "as loaded"
    assert sum(only["kernels"]["decode"].values()) == 7
    assert "quantized already" in failed(capsys, 2, "eval", tmp_path / "out", *where)
    assert "quantized already" in failed(capsys, 2, "quantize", tmp_path / "out", "-o", tmp_path / "more")


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    found = parsed(capsys, "env")
    assert found["versions"]["torch"] == torch.__version__
    kernels = {kernel["name"]: kernel["missing"] for kernel in found["kernels"]}
    assert kernels["reference_linear"] is None
    assert run(["env"]) == 0
    assert capsys.readouterr().out == f"{lowbit.env()}\n"
    assert len(str(lowbit.env()).splitlines()) <= 6
    assert run(["env", "--kernels"]) == 0
    assert "reference_linear" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert all(kernels[name] for name in kernels if "cuda" in name)


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    formats = parsed(capsys, "list", "formats")
    assert formats.keys() == lowbit.FORMATS.keys()
    assert formats["fp8_e5m2"]["values"][-1] == "nan"
    assert parsed(capsys, "list", "schemes")["int4"]["scheme"] == "uint4:g128:zint:bf16"
    assert parsed(capsys, "list", "methods")["gptq"]["options"]["damping"] == 0.01
    assert "cpu_laptop" in parsed(capsys, "list", "recipes")
    assert "reference_linear" in {kernel["name"] for kernel in parsed(capsys, "list", "kernels")}
    names = {
        "formats": lowbit.FORMATS,
        "schemes": lowbit.SCHEMES,
        "methods": ("rtn", "gptq", "awq", "damping=0.01", "act_order=true"),
        "recipes": ("four_bits_calibrated",),
        "kernels": ("cpu_gemv",),
    }
    for what, expected in names.items():
        assert run(["list", what]) == 0
        printed = capsys.readouterr().out
        assert [name for name in expected if name not in printed] == []


def test_a_plan_of_many_layers_is_short_and_fits_80_columns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=12, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert run(["plan", str(tmp_path), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("model.layers.0-11.mlp.up_proj ") and line.endswith("12 x 128 x 64") for line in lines)
    assert run(["plan", str(tmp_path), "--device", "cpu", "--layers"]) == 0
    assert "model.layers.7.mlp.up_proj" in capsys.readouterr().out
    assert run(["quantize", str(tmp_path), "-o", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert run(["inspect", str(tmp_path / "out")]) == 0
    assert "model.layers.0-11.mlp.up_proj" in capsys.readouterr().out


def test_demo(
    model: Path, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowbit.evals import demo, gemv

    read = demo.Material.read
    monkeypatch.setattr(demo, "TOY", model)
    monkeypatch.setattr(demo.Material, "read", lambda limit: read(material, material / "text.txt", limit=limit))
    found = parsed(capsys, "demo", "--limit", 3)
    assert [outcome["recipe"] for outcome in found["outcomes"]] == ["float", *demo.RECIPES]
    assert all(outcome["speed"]["tokens_per_second"] > 0 for outcome in found["outcomes"])
    assert found["gemv"] is None
    decode_speeds = gemv.decode_speeds
    monkeypatch.setattr("lowbit.evals.gemv._USUAL", (512, 512))
    monkeypatch.setattr(gemv, "decode_speeds", lambda recipes, *rest: decode_speeds(recipes[:1], *rest))
    out = tmp_path / "out"
    (float_row, row) = parsed(capsys, "demo", "--limit", 1, "--out", out)["gemv"]["rows"]
    assert (float_row["scheme"], row["scheme"], row["n"]) == ("float", "int8", 512)
    assert sorted(path.suffix for path in out.iterdir()) == [".html", ".json", *[".png"] * 5]
    assert run(["demo", "--limit", "2"]) == 0
    printed = capsys.readouterr().out
    assert "int8, x int8" in printed
    assert "2 exam questions" in printed


@pytest.mark.parametrize("arguments", [["demo"], ["eval", "--recipes", "int8"]])
def test_a_wheel_has_no_toy_model(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowbit.evals import demo
    from lowbit.evals.toy import bundled

    for module in (demo, bundled):
        monkeypatch.setattr(module, "TOY", tmp_path / "absent")
    said = " ".join(failed(capsys, 1, *arguments).split())
    assert "wheels leave it out, the repository and the sdist have it (make demo); lowbit eval MODEL measures" in said


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "arguments", "words"),
    [
        (2, ["frobnicate"], "No such command"),
        (2, ["plan"], "Missing argument"),
        (2, ["plan", "MODEL", "--recipe", "int44"], "no scheme, recipe or file named 'int44'; did you mean"),
        (2, ["plan", "MODEL", "--colour"], "No such option"),
        (2, ["eval", "MODEL", "--shots", "6"], "'--shots'"),
        (2, ["quantize", "MODEL", "-o", "MODEL"], "is the model itself"),
        (2, ["quantize", "MODEL", "-o", "MATERIAL"], "holds files that lowbit did not write"),
        (2, ["quantize", "MODEL", "-o", "MATERIAL/text.txt"], "is a file"),
        (2, ["quantize", "MODEL", "-o", "MATERIAL/text.txt/out"], "is no folder that takes files"),
        (2, ["plan", "MODEL", "--device", "abacus"], "device 'abacus' cannot be used here"),
        (2, ["eval", "MODEL", "--device", "abacus"], "device 'abacus' cannot be used here"),
        (2, ["eval", "MODEL", "--report", "MATERIAL/absent/report.json"], "absent is no folder that takes files"),
        (2, ["eval", "MODEL", "--report", "MATERIAL"], "is a folder"),
        (2, ["plan", "./absent"], "no folder ./absent"),
        (2, ["plan", "MODEL", "-r", "absent.yaml"], "cannot be read"),
        (1, ["inspect", "MODEL"], "not written by lowbit.save"),
        (1, ["inspect", "MATERIAL/text.txt"], "text.txt"),
        (2, ["inspect", "./absent"], "absent"),
        (2, ["report", "./absent.json"], "no file absent.json"),
        (2, ["report", "MATERIAL/text.txt", "--out", "MATERIAL/text.txt"], "is a file: give a folder"),
        (1, ["report", "MATERIAL/text.txt"], "text.txt"),
        (2, ["allocate", "./absent.json"], "no file absent.json"),
        (1, ["allocate", "MATERIAL/text.txt"], "text.txt cannot be read"),
        (2, ["allocate", "MATERIAL/text.txt", "--out", "MATERIAL/absent/recipe.yaml"], "absent is no folder that takes files"),
        (2, ["sensitivity", "MODEL", "--calibration", "./absent.txt"], "no text file absent.txt"),
        (2, ["quantize", "MODEL", "-o", "OUT", "--calibration", "MATERIAL/text.txt", "--max-memory", "8 giga"], "got '8 giga'"),
        (2, ["bench", "gemv", "--device", "abacus"], "device 'abacus' cannot be used here"),
        (2, ["bench", "host", "--device", "abacus"], "device 'abacus' cannot be used here"),
        (2, ["bench", "generate", "MODEL", "--device", "abacus"], "device 'abacus' cannot be used here"),
        (2, ["bench", "generate", "MODEL", "--out", "MATERIAL/absent/out.json"], "absent is no folder that takes files"),
        (2, ["bench", "gemv", "--out", "MATERIAL/text.txt"], "is a file: give a folder"),
        (2, ["bench", "gemv", "--layout", "nosuch"], "--layout names nosuch; there are canonical"),
        (2, ["bench", "gemv", "--kernels", "nosuch"], "--kernels names nosuch; there are"),
        (2, ["tune", "MODEL", "--device", "abacus"], "device 'abacus' cannot be used here"),
        (2, ["eval", "MODEL", "--tasks", "nosuch", "--data", "MATERIAL"], "lm-eval knows no task 'nosuch'"),
        (2, ["eval", "MODEL", "--tasks", "mmlu", "--data", "./absent"], "no folder absent"),
        (2, ["plan", "MATERIAL/text.txt"], "is a file: give the folder that holds config.json"),
        (2, ["plan", "MATERIAL"], "holds no config.json"),
        (2, ["doctor", "MODEL", "MODEL"], "is no folder that lowbit quantize wrote"),
        (1, ["eval", "MODEL", "--tasks", "mmlu", "--data", "MODEL"], "holds no test/SUBJECT_test.csv"),
        (2, ["eval", "MODEL", "--data", "MATERIAL", "--text", "absent.txt"], "no file absent.txt"),
        (
            1,
            ["eval", "MODEL", "--data", "MATERIAL", "--text", "MATERIAL/text.txt", "--context", "4096"],
            "at most the model's 128",
        ),
    ],
)
def test_errors_are_one_line(
    model: Path, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, arguments: list[str], words: str
) -> None:
    places = {"MODEL": model, "MATERIAL": material, "OUT": tmp_path / "out"}
    filled = list(arguments)
    for name, place in places.items():
        filled = [argument.replace(name, str(place)) for argument in filled]
    line = failed(capsys, code, *filled)
    assert words in line
    assert not (tmp_path / "out").exists()
    # With --json the same stands on stdout, and nothing else there.
    assert run([*filled, "--json"]) == code
    captured = capsys.readouterr()
    (error,) = json.loads(captured.out).values()
    assert captured.err.splitlines() == [line]
    assert error["exit_code"] == code
    assert error["kind"].isidentifier()
    assert line.removeprefix("lowbit: error: ").removesuffix(" ...") in error["message"]


def test_an_error_that_nobody_foresaw(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise KeyError("lost\nin two lines")

    monkeypatch.setattr(lowbit, "env", broken, raising=False)
    assert "KeyError" in failed(capsys, 1, "env")
    monkeypatch.setenv("LOWBIT_TRACEBACK", "1")
    assert run(["env"]) == 1
    assert "in broken" in capsys.readouterr().err


def test_every_kind_of_error_is_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: BaseException) -> Any:
        def broken() -> None:
            raise error

        return broken

    for error, code, message in (
        (KeyError("lost\nin two lines"), 1, "KeyError: 'lost\\nin two lines'"),
        (ValueError(), 1, "ValueError"),
        (lowbit.CheckpointError("a" * 2000), 1, "a" * 2000),
        (FileNotFoundError(2, "No such file or directory", "x"), 1, "x: No such file or directory"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ):
        monkeypatch.setattr(lowbit, "env", raising(error), raising=False)
        assert run(["env", "--json"]) == code
        captured = capsys.readouterr()
        (found,) = json.loads(captured.out).values()
        assert (found["exit_code"], found["message"]) == (code, message)
        assert len(captured.err.splitlines()) == 1
        assert len(captured.err) < 700


def test_the_help_states_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert all(words in printed for words in ("0 success", "work that failed", "2 a mistake", "130 interrupted"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_help_of_a_command_ends_in_a_line_that_it_takes(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    words = shlex.split(EXAMPLES[name])
    assert words[:2] == ["lowbit", name]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known
    for word in words:
        Path(word).mkdir() if word.startswith("./") else Path(word).touch() if word.endswith((".txt", ".json")) else None
    for parameter in command.params:
        parameter.callback = None  # which looks into files
    command.make_context(name, words[2:])
    assert run([name, "--help"]) == 0
    assert words[-1] in capsys.readouterr().out


def test_progress_in_a_log_is_a_line_for_each_block(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("lowbit.command.console.time.monotonic", lambda: now)
    said = Lines()
    for i, name in enumerate(f"model.layers.{block}.{leaf}" for block in range(3) for leaf in ("q", "k", "v")):
        said(name, i, 9)
    for _ in range(100):
        now += 1.0
        said("writing out", 1, 2)
    lines = capsys.readouterr().err.splitlines()
    blocks, rest = lines[:3], lines[3:]
    assert [line.split(",")[0] for line in blocks] == [f"model.layers.{block}.q" for block in range(3)]
    assert rest == [f"writing out, 1 of 2, {seconds} s" for seconds in (30, 60, 90)]


def test_no_arguments_is_bad_usage_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "quantize" in capsys.readouterr().out
    assert run(["--help"]) == 0
    assert run(["--version"]) == 0
    assert f"lowbit {lowbit.__version__}" in capsys.readouterr().out


def test_a_reader_that_goes_away() -> None:
    program = "from lowbit.command import main; import sys; sys.argv = ['lowbit', 'list', 'formats', '--json']; main()"
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 1
    assert errors == b""


# ---- other programs --------------------------------------------------------------------------------------------------

PROBE = "import sys; print('lowbit' in sys.modules, __name__, sys.argv)"


def test_another_program_with_lowbit_imported(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE, encoding="utf-8")

    def ask(*arguments: str) -> tuple[int, str]:
        program = [sys.executable, "-m", "lowbit", *arguments]
        done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    found = str(tmp_path / "probe.py")
    assert ask("-m", "probe", "--model", "hf") == (0, f"True __main__ {[found, '--model', 'hf']}\n")
    assert ask("-m") == (2, "lowbit: error: -m needs the name of a module, as in python -m lowbit -m lm_eval\n")
    for absent in ("absent", "absent.below"):
        assert ask("-m", absent) == (2, f"lowbit: error: there is no module {absent}\n")
    assert ask("--version") == (0, f"lowbit {lowbit.__version__}\n")
