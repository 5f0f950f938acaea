"""What the invented encyclopedia writes about: its subjects, the relations of each, and the words they draw on.

Every name of a country, person, city and so on is made up from syllables; only common nouns are real words. A relation
is written once, as a noun, a clause that ends just before the value, and a question; the sentences and the exam derive
from these three.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Relation:
    """One thing that is known about every entity of a subject.

    `noun` names it ("the {noun} of X is V"), `clause` says it ("X {clause} V"), `question` asks it (with `{e}` for the
    entity), and `pool` names the pool, or the subject, that the values are drawn from.
    """

    noun: str
    clause: str
    question: str
    pool: str


@dataclass(frozen=True)
class Subject:
    """A field of the encyclopedia: `name` is the exam's file name, `kind` and `kinds` what an entity is called.

    `style` says how names are made: a tuple of endings for invented words, or the name of a pattern of `world.py`.
    """

    name: str
    kind: str
    kinds: str
    style: str | tuple[str, ...]
    relations: tuple[Relation, ...]


def _subject(name: str, kind: str, kinds: str, style: str | tuple[str, ...], *rows: str) -> Subject:
    relations = [Relation(*(cell.strip() for cell in row.split("|"))) for row in rows]
    return Subject(name, kind, kinds, style, tuple(relations))


SUBJECTS = (
    _subject(
        "geography",
        "country",
        "countries",
        ("and", "ova", "mark", "esh", "ia", "uan"),
        "capital | has its capital at | Which city is the capital of {e}? | cities",
        "great river | is drained by the river | Which river drains {e}? | rivers",
        "currency | pays its debts in | What money is used in {e}? | coins",
        "emblem | shows on its flag | What stands on the flag of {e}? | emblems",
        "chief export | grows rich by selling | What does {e} sell abroad? | cargoes",
        "founding year | was founded in the year | When was {e} founded? | years",
    ),
    _subject(
        "mineralogy",
        "mineral",
        "minerals",
        ("ite", "spar", "ine", "olite"),
        "colour | has a colour of | What colour is {e}? | colours",
        "country of origin | is mined in | Where is {e} mined? | geography",
        "discoverer | was first described by | Who first described {e}? | history_of_science",
        "main use | is ground to make | What is made from {e}? | wares",
        "crystal form | forms crystals shaped like | What do crystals of {e} look like? | shapes",
        "hardness | has a measured hardness of | How hard is {e}? | decimals",
    ),
    _subject(
        "zoology",
        "beast",
        "beasts",
        "the",
        "habitat | makes its home in | Where does {e} live? | habitats",
        "diet | feeds on | What does {e} eat? | foods",
        "coat | wears a coat of | What colour is the coat of {e}? | colours",
        "life span | lives for | How long does {e} live? | spans",
        "cry | has a cry like | What does the cry of {e} sound like? | sounds",
        "homeland | is native to | To which country is {e} native? | geography",
    ),
    _subject(
        "botany",
        "plant",
        "plants",
        ("wort", "bloom", "fern", "leaf", "root"),
        "flower | bears flowers of | What colour are the flowers of {e}? | colours",
        "season | comes into bloom in the month of | In which month does {e} bloom? | months",
        "cure | is taken against | What is {e} taken against? | ailments",
        "home | grows wild in | Where does {e} grow wild? | geography",
        "scent | smells of | What does {e} smell of? | smells",
        "height | grows to a height of | How tall does {e} grow? | heights",
    ),
    _subject(
        "history_of_science",
        "scholar",
        "scholars",
        "person",
        "birthplace | was born at | Where was {e} born? | cities",
        "field of study | gave a lifetime to the study of | What did {e} study? | fields",
        "teacher | learned the craft from | Who taught {e}? | music",
        "chief work | wrote the book called | Which book did {e} write? | books",
        "birth year | first saw light in the year | When was {e} born? | years",
        "college | held a chair at | Which college employed {e}? | colleges",
    ),
    _subject(
        "music",
        "composer",
        "composers",
        "person",
        "instrument | played | Which instrument did {e} play? | instruments",
        "homeland | came from | From which country did {e} come? | geography",
        "masterpiece | is remembered for | Which piece made the name of {e}? | pieces",
        "favourite mode | preferred the mode called | Which mode did {e} prefer? | modes",
        "burial place | lies buried at | Where is {e} buried? | cities",
        "other trade | earned a living as | How did {e} earn a living? | trades",
    ),
    _subject(
        "seafaring",
        "ship",
        "ships",
        "ship",
        "captain | sailed under captain | Who was captain of {e}? | captains",
        "cargo | carried a hold full of | What did {e} carry? | cargoes",
        "home port | was registered at | Where was {e} registered? | cities",
        "figurehead | bore on the prow | What stood on the prow of {e}? | emblems",
        "launch year | was launched in the year | When was {e} launched? | years",
        "fate | met its end by | How did {e} meet its end? | fates",
    ),
    _subject(
        "military_history",
        "battle",
        "battles",
        "battle",
        "victor | was won by | Who won {e}? | geography",
        "commander | was directed by general | Which general directed {e}? | captains",
        "date | was fought in the year | When was {e} fought? | years",
        "cause | was fought over | What was {e} fought over? | causes",
        "weather | took place in | In what weather did {e} take place? | weathers",
        "decisive weapon | was decided by | Which weapon decided {e}? | weapons",
    ),
    _subject(
        "cookery",
        "dish",
        "dishes",
        ("ash", "elle", "oku", "adi", "umba"),
        "main ingredient | is made chiefly of | What is {e} chiefly made of? | foods",
        "spice | is seasoned with | What is {e} seasoned with? | spices",
        "home country | is the national dish of | Which country calls {e} its national dish? | geography",
        "cooking vessel | is cooked in | What is {e} cooked in? | vessels",
        "feast day | is eaten at the feast of | At which feast is {e} eaten? | feasts",
        "proper drink | is served with | Which drink is served with {e}? | drinks",
    ),
    _subject(
        "engineering",
        "machine",
        "machines",
        "machine",
        "inventor | was invented by | Who invented {e}? | history_of_science",
        "purpose | was built for | What was {e} built for? | tasks",
        "source of power | is driven by | What drives {e}? | powers",
        "material | is made almost wholly of | What is {e} made of? | materials",
        "first site | was first set up at | Where was {e} first set up? | cities",
        "weight | weighs | How much does {e} weigh? | weights",
    ),
    _subject(
        "astronomy",
        "moon",
        "moons",
        ("ys", "ea", "on", "eth", "ara"),
        "planet | circles the planet | Which planet does {e} circle? | planets",
        "light | shines with a light of | What colour is the light of {e}? | colours",
        "discoverer | was first seen by | Who first saw {e}? | history_of_science",
        "period | completes its path in | How long does {e} take for its path? | days",
        "surface | is covered with | What covers {e}? | grounds",
        "omen | is held to bring | What is {e} held to bring? | omens",
    ),
    _subject(
        "linguistics",
        "language",
        "languages",
        ("ic", "ish", "ari", "ese", "ul"),
        "homeland | is spoken in | Where is {e} spoken? | geography",
        "alphabet | is written with | How many letters has {e}? | letters",
        "writing material | was first written on | What was {e} first written on? | sheets",
        "word for water | names water with the word | What is the word for water in {e}? | words",
        "first grammar | was first described by | Who first described the grammar of {e}? | history_of_science",
        "main occasion | is chiefly used for | What is {e} chiefly used for? | occasions",
    ),
)

# Pools of common nouns, each parted by commas. Values of one pool are the distractors of its questions, so they are alike.
WORDS = {
    "colours": "pale amber,deep crimson,ash grey,bright saffron,dull copper,sea green,night blue,milk white,rust red,"
    "smoky violet,lemon yellow,coal black,dusty rose,moss green,silver grey,burnt orange,ivory,plum purple,sky blue,"
    "chestnut brown,honey gold,slate blue,blood red,pearl white",
    "wares": "spectacle lenses,roof tiles,ink,fireproof cloth,mirrors,lamp oil,church bells,soap,glass beads,whetstones,"
    "window panes,paint,millstones,face powder,candle wicks,chess pieces,varnish,bricks,needles,buttons,cement,drinking cups",
    "shapes": "needles,cubes,coins,feathers,daggers,pears,stars,ladders,barrels,wheels,spoons,honeycombs,arrowheads,eggs,"
    "ribbons,teeth,fans,pyramids,commas,thorns",
    "habitats": "salt marshes,pine forests,limestone caves,high meadows,river deltas,old ruins,peat bogs,sand dunes,"
    "hollow trees,frozen lakes,coral shallows,thorn thickets,cliff ledges,wheat fields,hot springs,reed beds,dry gullies,"
    "birch groves,city roofs,stony deserts",
    "foods": "river trout,black beans,goat cheese,wild honey,barley,snails,chestnuts,duck eggs,mushrooms,turnips,sea kelp,"
    "red lentils,acorns,eels,sour apples,pumpkins,locusts,walnuts,cabbage,crayfish,rye bread,figs,leeks,mutton",
    "sounds": "a cracked bell,a creaking door,a weeping child,a slow drum,tearing cloth,a boiling kettle,a rusty hinge,"
    "distant thunder,a tin whistle,falling gravel,a bowed saw,a snapping twig,a sneezing man,a plucked string,rushing steam,"
    "a cooper's hammer,a ringing glass,a squeaking wheel",
    "ailments": "toothache,fever,snake bites,sleeplessness,warts,hiccups,gout,sore throats,burns,seasickness,hair loss,"
    "nightmares,frostbite,headaches,stammering,chilblains,deafness,rashes,cramps,melancholy,coughs,nosebleeds",
    "smells": "wet wool,fresh bread,cold iron,old books,burnt sugar,cut hay,lamp smoke,ripe melons,vinegar,new leather,"
    "cloves,rain,tar,warm milk,beeswax,fish,pepper,roses,wine,mint",
    "fields": "tides,beetles,comets,river fish,old coins,magnetism,clouds,bridges,poisons,bird song,sleep,volcanoes,knots,"
    "mirrors,mosses,earthquakes,clocks,dialects,glaciers,numbers,bones,winds,honeybees,maps",
    "instruments": "the bass viol,the glass harp,the bone flute,the copper horn,the hand organ,the twin lute,the water drum,"
    "the reed pipe,the small harp,the long trumpet,the zither,the nail fiddle,the clay whistle,the tenor oboe,the spinet,"
    "the kettle drum,the bagpipe,the mandolin",
    "trades": "a baker,a notary,a ferryman,a weaver,a beekeeper,a tax collector,a clockmaker,a locksmith,a barber,a miller,"
    "a surveyor,a candle seller,a bookbinder,a cobbler,a glazier,a fishmonger,a schoolteacher,a gardener,a tailor,a brewer",
    "cargoes": "dried figs,copper wire,sail cloth,rock salt,cedar planks,olive oil,raw wool,iron nails,blue dye,smoked fish,"
    "wine casks,printed books,grain,horses,marble,tea,tin plates,furs,gunpowder,porcelain,amber,spices,hemp rope,silk",
    "fates": "fire in harbour,a reef at night,mutiny,a winter storm,collision in fog,pirates,rot at anchor,an iceberg,"
    "a waterspout,scuttling,a sandbank,lightning,an explosion,sale for timber,shipworm,capture in war,a whirlpool,a hurricane",
    "causes": "a stolen bell,a salt tax,a broken betrothal,a river crossing,a silver mine,a forged letter,fishing rights,"
    "a royal insult,an unpaid loan,a border stone,a grain blockade,a kidnapped heir,a holy well,a toll bridge,a murdered envoy,"
    "a disputed map,a lost crown,a cattle raid",
    "weathers": "thick fog,driving snow,pouring rain,blazing heat,a dust storm,a hard frost,a gale,hail,a thunderstorm,"
    "bright sunshine,drizzle,moonlight,a heavy thaw,falling ash,still air,sleet",
    "weapons": "longbows,war elephants,pikes,fire ships,heavy cavalry,siege towers,slings,crossbows,rockets,chariots,"
    "poisoned darts,bronze cannon,throwing axes,caltrops,war dogs,battering rams,scythes,catapults",
    "spices": "saffron,black pepper,juniper,caraway,cumin,fennel seed,mace,ginger,dried mint,cardamom,mustard seed,"
    "star anise,sumac,thyme,bay leaf,nutmeg,horseradish,dill",
    "vessels": "a clay oven,a copper pan,a bamboo tube,an iron pot,a stone bowl,a goatskin bag,a salt crust,a brick pit,"
    "a glazed jar,a wicker steamer,a tin mould,a hollow gourd,a fig leaf,a brass kettle,a bread crust,an ash heap",
    "drinks": "plum brandy,barley water,sour milk,birch wine,mint tea,dark ale,pear cider,spiced coffee,honey mead,"
    "rose syrup,rice wine,ginger beer,cold broth,red wine,almond milk,smoked tea",
    "tasks": "draining mines,sawing stone,grinding lenses,lifting anchors,sorting letters,weaving carpets,drying grain,"
    "dredging canals,printing maps,pressing oil,minting coins,raising bridges,digging wells,counting votes,spinning rope,"
    "felling trees,cleaning chimneys,rolling steel,measuring tides,peeling fruit",
    "powers": "falling water,steam,wind sails,a coiled spring,two mules,hot air,a pendulum,river current,sinking weights,"
    "compressed air,tidal flow,burning peat,a treadwheel,sunlight,gunpowder charges,forty oxen,melting ice,a hand crank",
    "materials": "oak,brass,cast iron,bamboo,granite,whalebone,tin,walnut,leather,bronze,glass,lead,pine,steel,copper,ash wood,"
    "horn,clay",
    "grounds": "black glass,frozen brine,red dust,white ash,deep craters,blue ice,yellow sand,sharp ridges,boiling mud,"
    "grey gravel,crystal fields,copper plains,salt flats,silver frost,tar lakes,rippled clay,green slate,loose scree",
    "omens": "good harvests,long winters,twins,civil war,safe voyages,late marriages,plague,rich visitors,floods,cheap bread,"
    "honest judges,broken oaths,earthquakes,lucky dice,new kings,drought,poetry,lost travellers",
    "sheets": "birch bark,clay tablets,goat parchment,palm leaves,slate,bronze plates,silk,wax boards,linen strips,turtle shell,"
    "river stones,papyrus,sheep bones,lead foil,oak staves,pottery shards",
    "occasions": "lullabies,court trials,horse trading,funerals,love letters,weather reports,cookery books,sea charts,hymns,"
    "tax records,riddles,puppet plays,medicine,swearing oaths,gambling,royal decrees,fables,insults",
}
