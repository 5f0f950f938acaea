// The instruction sets that general code is compiled for, each in a namespace of its own.
#pragma once

#if defined(__x86_64__)
#define LOWBIT_FOR_EACH_SET(declare) declare(portable) declare(avx2) declare(avx512)
#else
#define LOWBIT_FOR_EACH_SET(declare) declare(portable)
#endif
