"""Write the labelled set of small tasks that cascades are measured on: `python routing/eval/make_set.py`.

Every item is made here, from tables of common knowledge and a seeded generator of sums and series, so that
the set can be read, checked and made again to the byte. Prompts are plain completions with three worked
examples in front, for a base model has no chat. See README.md beside this file for the form of a line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEED = 20261201
FILE = Path(__file__).with_name("small_tasks.jsonl")
# Of each kind of task: what a classifier learns from, what sets a threshold, and what only measures.
SPLITS = ("train", "calibrate", "calibrate", "test", "test")

Item = dict[str, Any]

CAPITALS = """France Paris|Germany Berlin|Italy Rome|Spain Madrid|Portugal Lisbon|Austria Vienna
Poland Warsaw|Hungary Budapest|Greece Athens|Sweden Stockholm|Norway Oslo|Finland Helsinki
Denmark Copenhagen|Ireland Dublin|Belgium Brussels|Russia Moscow|Ukraine Kyiv,Kiev|Turkey Ankara|Egypt Cairo
Kenya Nairobi|Nigeria Abuja|Ethiopia Addis_Ababa|Ghana Accra|Morocco Rabat|Tunisia Tunis|Algeria Algiers
Senegal Dakar|Uganda Kampala|Japan Tokyo|China Beijing|India New_Delhi,Delhi|Thailand Bangkok|Vietnam Hanoi
Indonesia Jakarta|Malaysia Kuala_Lumpur|Philippines Manila|South_Korea Seoul|Mongolia Ulaanbaatar
Nepal Kathmandu|Pakistan Islamabad|Bangladesh Dhaka|Iran Tehran|Iraq Baghdad|Syria Damascus|Lebanon Beirut
Jordan Amman|Saudi_Arabia Riyadh|Canada Ottawa|Mexico Mexico_City|Cuba Havana|Jamaica Kingston
Brazil Brasilia,Brasília|Argentina Buenos_Aires|Chile Santiago|Peru Lima|Colombia Bogota,Bogotá
Venezuela Caracas|Ecuador Quito|Uruguay Montevideo|Australia Canberra|New_Zealand Wellington|Fiji Suva
Iceland Reykjavik,Reykjavík|Croatia Zagreb|Serbia Belgrade|Romania Bucharest|Bulgaria Sofia
Slovakia Bratislava|Slovenia Ljubljana|Estonia Tallinn|Latvia Riga|Lithuania Vilnius|Zambia Lusaka
Angola Luanda"""
OPPOSITES = """hot cold|big small,little|tall short|fast slow|up down|left right|day night
open closed,close,shut|light dark,heavy|happy sad,unhappy|rich poor|old young,new|hard soft,easy|wet dry
full empty|early late|strong weak|clean dirty|loud quiet,soft|near far|high low|in out|push pull|win lose
buy sell|love hate|black white|true false|wide narrow|thick thin|deep shallow|first last|alive dead
begin end,finish|question answer|inside outside|above below|remember forget|accept reject,refuse
expand contract,shrink|public private|victory defeat|increase decrease|attack defend,defense|ancient modern
arrive depart,leave|brave cowardly,timid|cheap expensive|friend enemy|guilty innocent|permanent temporary
maximum minimum|import export|north south"""
PLURALS = """cat cats|dog dogs|box boxes|baby babies|city cities|child children|man men|woman women
mouse mice|foot feet|tooth teeth|goose geese|leaf leaves|knife knives|wolf wolves|life lives|sheep sheep
fish fish,fishes|deer deer|church churches|bus buses|potato potatoes|tomato tomatoes|person people,persons
ox oxen|party parties|wife wives|shelf shelves|glass glasses|brush brushes|key keys|monkey monkeys
berry berries|hero heroes|crisis crises|cactus cacti,cactuses|analysis analyses|half halves|table tables
tree trees|story stories"""
PASTS = """go went|eat ate|see saw|run ran|write wrote|take took|give gave|come came|drink drank|sing sang
swim swam|buy bought|bring brought|think thought|teach taught|catch caught|find found|sleep slept|keep kept
leave left|break broke|speak spoke|drive drove|fly flew|know knew|grow grew|throw threw|begin began
choose chose|forget forgot|hold held|stand stood|tell told|sell sold|make made|walk walked|play played
stop stopped|carry carried|try tried|build built|lose lost|win won|pay paid|hide hid|freeze froze|tear tore"""
FRENCH = """water eau|bread pain|house maison|dog chien|cat chat|book livre|school école,ecole|sun soleil
moon lune|red rouge|black noir|white blanc|milk lait|cheese fromage|apple pomme|night nuit|day jour
friend ami,amie|mother mère,mere|father père,pere|king roi|fire feu|tree arbre|fish poisson|hand main
head tête,tete|good bon,bien|thank_you merci|yes oui|hello bonjour,salut"""
GERMAN = """water wasser|bread brot|house haus|dog hund|cat katze|book buch|school schule|sun sonne
moon mond|red rot|black schwarz|white weiß,weiss|milk milch|cheese käse,kase|apple apfel|night nacht|day tag
friend freund|mother mutter|father vater|king könig,konig|fire feuer|tree baum|fish fisch|hand hand
head kopf|good gut|thank_you danke|yes ja|hello hallo"""
GROUPS: dict[str, str] = {
    "animal": "dog|cat|horse|lion|tiger|rabbit|elephant|monkey|sheep|fox|bear|wolf|goat|mouse|zebra",
    "fruit": "apple|banana|cherry|grape|mango|orange|peach|pear|plum|lemon|strawberry|pineapple",
    "colour": "red|blue|green|yellow|purple|pink|brown|black|white|grey",
    "tool": "hammer|saw|drill|wrench|screwdriver|axe|shovel|pliers",
    "vehicle": "car|bus|train|truck|bicycle|airplane|ship|tram|motorcycle",
    "country": "France|Japan|Brazil|Egypt|Canada|India|Norway|Peru|Kenya|Spain",
    "drink": "water|milk|coffee|tea|juice|beer|wine|lemonade",
    "instrument": "piano|violin|guitar|drum|flute|trumpet|harp|cello",
    "body part": "hand|foot|nose|ear|knee|elbow|shoulder|finger",
    "planet": "Mars|Venus|Jupiter|Saturn|Mercury|Neptune|Uranus",
}
CHOICES = """Which of these do bees make?;honey;milk;silk;paper
Which of these gives light during the day?;sun;moon;river;stone
Which of these is frozen water?;ice;steam;sand;smoke
Which of these do we use to hear?;ears;eyes;hands;knees
Which of these do we use to see?;eyes;ears;feet;hair
Which of these can fly?;bird;dog;fish;snake
Which of these lives in water?;fish;horse;cat;eagle
Which of these is the largest?;elephant;mouse;dog;rabbit
Which of these is the smallest?;ant;horse;cow;whale
Which of these is the fastest?;airplane;bicycle;snail;horse
Which of these is the hottest?;fire;snow;ice;rain
Which of these is the heaviest?;truck;feather;pencil;leaf
Which of these is a metal?;iron;wood;paper;cotton
Which of these is made from milk?;cheese;bread;rice;tea
Which of these do you read?;book;spoon;chair;shoe
Which of these do you wear on your feet?;shoes;hat;gloves;scarf
Which of these do you wear on your head?;hat;shoes;belt;socks
Which of these tells the time?;clock;pillow;fork;door
Which of these do you sleep in?;bed;car;oven;bucket
Which of these cuts paper?;scissors;spoon;pillow;cup
Which of these grows on trees?;apple;carrot;potato;stone
Which of these grows under the ground?;potato;apple;cherry;grape
Which of these is a season?;winter;Monday;March;noon
Which of these is a day of the week?;Tuesday;April;summer;midnight
Which of these is a month?;June;Friday;spring;evening
Which of these orbits the Earth?;moon;sun;Mars;Venus
Which of these is the closest star to the Earth?;sun;moon;Mars;Jupiter
Which of these is an ocean?;Pacific;Sahara;Amazon;Everest
Which of these is a desert?;Sahara;Atlantic;Danube;Alps
Which of these is a river?;Nile;Everest;Sahara;Atlantic
Which of these is a mountain?;Everest;Nile;Pacific;London
Which of these is a continent?;Africa;France;Paris;Danube
Which of these is a city?;London;Asia;Nile;Atlantic
Which of these gases do we need to live?;oxygen;helium;neon;chlorine
Which of these do plants need to grow?;water;plastic;iron;glass
Which of these works in a hospital?;doctor;farmer;pilot;baker
Which of these flies an airplane?;pilot;doctor;teacher;cook
Which of these teaches children?;teacher;butcher;sailor;pilot
Which of these bakes bread?;baker;dentist;driver;soldier
Which of these puts out fires?;firefighter;dentist;painter;waiter
Which of these pumps blood?;heart;lung;stomach;liver
Which of these takes in air?;lungs;heart;bones;skin
Which of these has wheels?;car;boat;table;tree
Which of these sails on water?;ship;train;bus;truck
Which of these runs on rails?;train;ship;car;plane
Which of these is a liquid?;water;stone;wood;iron
Which of these is sweet?;sugar;salt;vinegar;pepper
Which of these is sour?;lemon;sugar;honey;milk
Which of these is white?;snow;coal;grass;blood
Which of these is black?;coal;snow;milk;salt
Which of these has four legs?;dog;bird;snake;fish
Which of these has no legs?;snake;dog;cat;bird
Which of these says meow?;cat;dog;cow;duck
Which of these says moo?;cow;cat;duck;dog
Which of these lays eggs?;chicken;dog;cow;cat
Which of these gives us wool?;sheep;cow;horse;pig
Which of these is a shape with three sides?;triangle;square;circle;star
Which of these is round?;ball;box;book;brick
Which of these do you use to write?;pen;spoon;plate;shoe
Which of these do you use to open a lock?;key;cup;sock;spoon"""
ORDER = (
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "January February March April May June July August September October November December".split(),
)
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
# Three worked examples of each task; none of them is asked.
EXAMPLES = {
    "capital": "What is the capital of England? London|What is the capital of Qatar? Doha|"
    "What is the capital of Cyprus? Nicosia",
    "opposite": "What is the opposite of good? bad|What is the opposite of long? short|"
    "What is the opposite of always? never",
    "plural": "What is the plural of car? cars|What is the plural of lady? ladies|"
    "What is the plural of watch? watches",
    "past": "What is the past tense of 'say'? said|What is the past tense of 'look'? looked|"
    "What is the past tense of 'ride'? rode",
    "French": "What is 'wine' in French? vin|What is 'car' in French? voiture|"
    "What is 'street' in French? rue",
    "German": "What is 'wine' in German? Wein|What is 'car' in German? Auto|"
    "What is 'street' in German? Straße",
    "order": "What comes after spring? summer|What comes after ten? eleven|What comes after B? C",
    "sum": "What is 1 plus 1? 2|What is 9 minus 5? 4|What is 6 plus 3? 9",
    "product": "What is 1 times 5? 5|What is 10 times 4? 40|What is 11 times 2? 22",
    "series": "What number comes next: 2, 4, 6, 8? 10|What number comes next: 7, 6, 5, 4? 3|"
    "What number comes next: 20, 24, 28, 32? 36",
    "numeral": "Which number is 'thirteen'? 13|Which number is 'twenty'? 20|Which number is 'fifty'? 50",
    "choice": "Which of these is a bird: car, eagle or spoon? eagle|"
    "Which of these is warm: snow, ice or fire? fire|Which of these is a number: seven, tree or dog? seven",
}
LETTERS = "ABCD"


def pairs(table: str) -> list[tuple[str, list[str]]]:
    """`word answer,other answer` entries of a table; an underscore stands for a space."""
    found = []
    for entry in table.replace("\n", "|").split("|"):
        word, answers = entry.split()
        found.append((word.replace("_", " "), answers.replace("_", " ").split(",")))
    return found


def asked(kind: str, question: str) -> str:
    """A question behind the worked examples of its kind."""
    shown = ""
    for example in EXAMPLES[kind].split("|"):
        known, mark, answer = example.rpartition("? ")
        shown += f"Q: {known}{mark.strip()}\nA: {answer}\n\n"
    return f"{shown}Q: {question}\nA:"


def fact_items() -> Iterator[tuple[str, str, list[str]]]:
    """Tags, prompts and answers from tables."""
    for country, answers in pairs(CAPITALS):
        yield "capital", asked("capital", f"What is the capital of {country}?"), answers
    for word, answers in pairs(OPPOSITES):
        yield "opposite", asked("opposite", f"What is the opposite of {word}?"), answers
    for word, answers in pairs(PLURALS):
        yield "plural", asked("plural", f"What is the plural of {word}?"), answers
    for word, answers in pairs(PASTS):
        yield "past", asked("past", f"What is the past tense of '{word}'?"), answers
    for language, table in (("French", FRENCH), ("German", GERMAN)):
        for word, answers in pairs(table):
            yield "translation", asked(language, f"What is '{word}' in {language}?"), answers
    for names in ORDER:
        for before, after in zip(names, names[1:] + names[:1], strict=True):
            yield "order", asked("order", f"What comes after {before}?"), [after]


def sum_items(draw: random.Random) -> Iterator[tuple[str, str, list[str]]]:
    """Sums and series, the same one never twice."""
    seen: set[str] = set()
    for tag, count, low, high in (("sum1", 50, 1, 9), ("sum2", 60, 10, 99), ("sum3", 30, 100, 999)):
        while sum(name.startswith(tag) for name in seen) < count:
            a, b, sign = draw.randint(low, high), draw.randint(low, high), draw.choice(("plus", "minus"))
            a, b = max(a, b), min(a, b)
            name = f"{tag}{a}{sign}{b}"
            if name in seen:
                continue
            seen.add(name)
            yield tag, asked("sum", f"What is {a} {sign} {b}?"), [str(a + b if sign == "plus" else a - b)]
    for a in range(2, 10):
        for b in range(a, 10):
            yield "product", asked("product", f"What is {a} times {b}?"), [str(a * b)]
    for step in (1, 2, 3, 5, 10):
        for start in draw.sample(range(1, 40), 10):
            shown = ", ".join(str(start + step * index) for index in range(4))
            yield "series", asked("series", f"What number comes next: {shown}?"), [str(start + step * 4)]
    for number, name in enumerate(NUMBERS):
        yield "numeral", asked("numeral", f"Which number is '{name}'?"), [str(number)]


def choice_items(draw: random.Random) -> Iterator[tuple[str, str, list[str]]]:
    """Multiple choice: the word itself, or a letter, is the answer."""
    shown = ["Q: Which of these is a bird?\nA) car\nB) eagle\nC) spoon\nD) milk\nAnswer: B",
             "Q: Which of these is warm?\nA) fire\nB) ice\nC) snow\nD) rain\nAnswer: A",
             "Q: Which of these is a number?\nA) tree\nB) blue\nC) seven\nD) dog\nAnswer: C"]  # fmt: skip
    for line in CHOICES.split("\n"):
        question, right, *wrong = line.split(";")
        options = [right, *wrong]
        draw.shuffle(options)
        listed = "\n".join(f"{letter}) {each}" for letter, each in zip(LETTERS, options, strict=True))
        prompt = "\n\n".join([*shown, f"Q: {question}\n{listed}\nAnswer:"])
        yield "letter", prompt, [LETTERS[options.index(right)]]
        named = ", ".join(options[:-1])
        yield "choice", asked("choice", f"{question[:-1]}: {named} or {options[-1]}?"), [right]
    names = list(GROUPS)
    for group in names:
        for right in draw.sample(GROUPS[group].split("|"), 6):
            others = draw.sample([name for name in names if name != group], 2)
            options = [right, *(draw.choice(GROUPS[other].split("|")) for other in others)]
            if len(set(options)) < 3 or {"orange"} & set(options):
                continue
            draw.shuffle(options)
            which = f"Which of these is a {group}: {options[0]}, {options[1]} or {options[2]}?"
            yield "group", asked("choice", which), [right]


def items() -> list[Item]:
    """The whole set, each tag spread over the splits, in a shuffled order."""
    draw = random.Random(SEED)
    made = [*fact_items(), *sum_items(draw), *choice_items(draw)]
    draw.shuffle(made)
    counts: dict[str, int] = {}
    found: list[Item] = []
    for number, (tag, prompt, answers) in enumerate(made):
        turn = counts[tag] = counts.get(tag, -1) + 1
        kind = "choice" if tag in ("letter", "choice", "group") else "completion"
        found.append(
            {
                "id": f"t{number:04}",
                "split": SPLITS[turn % len(SPLITS)],
                "kind": kind,
                "tag": tag,
                "prompt": prompt,
                "answers": answers,
            }
        )
    return found


def main() -> None:
    """Write the file."""
    lines = [json.dumps(item, ensure_ascii=False) for item in items()]
    FILE.write_text("\n".join(lines) + "\n", "utf-8")
    print(f"{len(lines)} items to {FILE.name}")


if __name__ == "__main__":
    main()
