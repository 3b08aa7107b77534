"""Word lists of the built-in model's tasks, and words that nobody has seen: made of syllables or of random letters."""

from __future__ import annotations

from random import Random


def listed(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
CITIES = listed(
    "Paris London Berlin Madrid Rome Vienna Prague Lisbon Oslo Dublin Athens Warsaw Helsinki Budapest Zurich Munich "
    "Milan Tokyo Osaka Seoul Beijing Delhi Mumbai Bangkok Hanoi Sydney Cairo Nairobi Lagos Toronto Boston Chicago "
    "Denver Seattle Houston Miami Lima Bogota Santiago Havana"
)
NAMES = listed("Anna Ben Carla David Emma Felix Grace Henry Iris Jack Karl Laura Maria Nina Oscar Paul Rosa Sara Tom Victor")
ITEMS = listed(
    "apples pears plums grapes lemons melons cherries bananas oranges carrots onions potatoes tomatoes eggs loaves "
    "cups plates bottles chairs tables lamps books pens pencils boxes keys stamps coins balls hats shoes socks"
)
COLOURS = listed("red blue green yellow black white brown purple orange grey pink")
KEYS = listed("answer result value output solution total reply out data final response sum number text")
NUMERALS = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
NOUNS = listed(
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name president team minute idea "
    "body information back parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education dog cat horse bird fish tree flower river "
    "mountain sea sky sun moon star fire stone metal wood paper music song movie picture computer phone internet "
    "software engine train plane ship bus street road bridge garden kitchen table chair bed window wall floor bread "
    "cheese milk coffee tea sugar salt pepper soup cake apple banana strawberry pear"
)
VERBS = listed(
    "be have do say get make go know take see come think look want give use find tell ask work seem feel try leave "
    "call need become put mean keep let begin help talk turn start show hear play run move like live believe hold "
    "bring happen write provide sit stand lose pay meet include continue set learn change lead understand watch "
    "follow stop create speak read allow add spend grow open walk win offer remember love consider appear buy wait "
    "serve die send expect build stay fall cut reach kill remain suggest raise pass sell require report decide pull "
    "fix draw paint cook sing dance swim fly drive"
)
QUALITIES = listed(
    "good new first last long great little own other old right big high different small large next early young "
    "important few public bad same able happy sad angry hungry tired cold hot warm fast slow easy hard strong weak "
    "rich poor clean dirty deep wide dark light heavy empty full quiet loud sweet bitter famous strange beautiful "
    "dangerous expensive cheap"
)
SMALL = listed(
    "the and for are but not you all any can her was our out get has him his how its may now say she too use that with this "
    "from they been call come each here just know like made make many more most much must name only over such take than them "
    "then time very well what when where which while would could should about after again before there these those count add "
    "sort reverse spell turn word letter letters number numbers backwards appears answer please today tomorrow"
)
SAID = listed(  # what the tasks and their answers are worded with
    "adding ago am among an analysis arithmetic around arrange article as ascending asked asks assistant at ate away "
    "bags bare bigger biggest binary borrow box brief briefly built buys by calculate calculation calculator cannot "
    "carry celsius cent centimeter centimeters cents centuries century channel characters check clear clock coat "
    "colour columns comes compare comparing compute condition convert cost costs countdown counting current data date "
    "days decade decades decreasing degrees descending differ difference digit digits divide divided division does "
    "dollar dollars duration else entry euro euros evaluate every expert explanation expression fahrenheit far feet "
    "fetch field final foot forecast form formula found friendly friends functions gives goodbye gram grams greater "
    "greatest greeting had hello helpful highest holds homework hours hundred hundreds if in inches included "
    "increasing input into is it item key kilogram kilograms kilometer kilometers language larger largest late learnt "
    "least left length less list lists liter liters local location lower lowest makes max maximum me medium message "
    "meter meters milliliter milliliters millimeters min mine minimum minus minutes mistakes model months multiplied "
    "multiply my needs no nothing object occur of often on ones or order output plus polite price prices product "
    "products pupils query questions raining remainder reply response rest result reversed reversing rows runs says "
    "search second seconds shares shop short smaller smallest so sold solution some something sorting spelled started "
    "status still string subtract sum sums task temperature tens term text thanks their things thousands through "
    "timer times tiny to together tool tools total town track trained true tutor type unit units up user value wants "
    "we weather web weekday weekdays weeks welcome were who will words years yes your yourself"
)
SKIES = listed("sunny cloudy rainy windy foggy snowy stormy clear")

ONSETS = listed("b c d f g h j k l m n p r s t v w z br cl dr fl gr kn pl pr sh sl sn sp st str th tr")
VOWELS = listed("a e i o u a e i o u ea oo ai ee ou")
CODAS = ["", "", "", *listed("b d g k l m n p r s t x y ck ll mp nd ng nk rd rm rn rt ss st tt")]


def word(rng: Random, shortest: int = 3, longest: int = 10) -> str:
    """A lower-case word of that many letters: three in four speakable, the others random letters."""
    if rng.random() < 0.25:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(shortest, longest)))
    length = rng.randint(shortest, longest)
    made = ""
    while len(made) < length:
        made += rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
    return made[:length]


def any_word(rng: Random, longest: int = 12) -> str:
    """A word of the lists, or an unseen one."""
    return (
        rng.choice(rng.choice((NOUNS, VERBS, QUALITIES, ITEMS, COLOURS, KEYS))) if rng.random() < 0.4 else word(rng, 3, longest)
    )


def name_word(rng: Random) -> str:
    """A word for a name or key: capitalised names, items, or an unseen word."""
    roll = rng.random()
    if roll < 0.4:
        return rng.choice(ITEMS)
    if roll < 0.65:
        return rng.choice(NAMES)
    made = word(rng, 3, 7)
    return made.capitalize() if rng.random() < 0.3 else made


def city(rng: Random) -> str:
    """A city, known or not, of one word or two."""
    if rng.random() < 0.12:
        return rng.choice(("San ", "New ", "Los ", "Saint ", "Rio ", "Port ", "El ")) + word(rng, 4, 9).capitalize()
    return rng.choice(CITIES) if rng.random() < 0.7 else word(rng, 4, 8).capitalize()


def identifier(rng: Random, choices: str, unseen: float = 0.3) -> str:
    """One of the names in `choices`, or (with that chance) an unseen one, such as a tool might have."""
    if rng.random() < unseen:
        made = any_word(rng, 6) if rng.random() < 0.6 else word(rng, 3, 6)
        return f"{made}_{any_word(rng, 5)}" if rng.random() < 0.4 else made
    return rng.choice(choices.split())
