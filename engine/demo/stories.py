"""Little stories with a world state: who wants what, what is in the way, who helps, how it ends.

A `Story` first fixes its facts (hero, home, wish, helper, obstacle) and then tells them beat by
beat. Each beat is a tuple of alternative sentences over the same facts, so names, pronouns and
objects stay consistent while the wording varies. The same facts phrase the request for the story
("about a fox who wants to find a lost bell") and the questions about it afterwards.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from world import (
    ANIMALS,
    BEINGS,
    FEMALE,
    HELPER_FEMALE,
    HELPER_MALE,
    MALE,
    RARE_HEROES,
    phrases,
    rows,
    words,
)

ABILITY = {row[0]: row[2] for row in ANIMALS} | {
    "dragon": "fly",
    "fairy": "fly",
    "giant": "strong",
    "robot": "strong",
    "troll": "strong",
    "sailor": "swim",
    "dinosaur": "strong",
    "gnome": "small",
    "elf": "climb",
    "parrot": "fly",
}
SHE = {"girl", "princess", "queen", "witch", "fairy", "mermaid", "hen", "cow", "shepherdess"}
HE = {"boy", "prince", "king", "wizard", "snowman", "rooster", "fisherman", "postman", "knight"}
ADJECTIVES = words("""
    little clever shy curious young old kind cheerful lazy sleepy grumpy brave lonely merry gentle
    busy proud small happy hungry quiet tiny friendly poor wise
""")
COLOURS = words("red blue green yellow white silver golden black")
OBJECTS = words("""
    bell key lantern scarf hat ring kite drum book map ball button spoon flute cup basket mitten
    coin feather umbrella clock crown horn watch necklace whistle blanket pen violin compass
""")
GIVERS = ("grandmother", "grandfather", "mother", "father", "best friend", "uncle", "aunt")
SEASON_WEATHER = {
    "spring": ("mild", "rainy", "bright"),
    "summer": ("hot", "sunny", "bright"),
    "autumn": ("windy", "foggy", "golden"),
    "winter": ("cold", "snowy", "frosty"),
}
HOMES = phrases("""
    at the edge of a quiet forest | in a small house by the river |
    near the harbour of a small town | on a green hill above the village |
    in a valley full of flowers | beside a slow brown river | in a hollow behind the mill |
    at the foot of a tall mountain | on a little farm | in a cosy cottage beside the road |
    on an island in a lake | under the roots of an old oak
""")
HABITS = phrases("""
    swept the doorstep and drank a cup of mint tea | counted the clouds | sang to the birds |
    walked down to the water and back | watered the flowers by the door |
    bowed to the rising sun | ate two slices of bread with honey | told the wind good morning
""")
LOVES = phrases("""
    warm bread | rainy evenings | old songs | stories by the fire | bright mornings |
    the smell of apples | long walks | the sound of the wind
""")
SEARCHES = rows("""
under the bed | dust and an old sock
behind the stove | a cold crumb of cheese
in the garden shed | two rusty nails
beside the well | a puddle
under the table | a sleeping beetle
in the big chest | winter coats
behind the apple tree | three green apples
on the roof | an empty nest
in the hay | a broken rake
""")
FOODS = phrases("""
    a loaf of bread | three apples | a piece of cheese | a bag of nuts | a pot of honey |
    a warm blanket and some cake
""")

# What a helper of this ability does: where a lost thing lies, how it is fetched, what blocks a
# road, how trying alone fails, and how the helper opens the way.
SKILLS = {
    row[0]: row[1:]
    for row in rows("""
fly | high in the top of an oak | {hn} flew up through the branches and brought it down | a thick
    fog lay over the road | {n} walked in a circle and came back to the same stone | {hn} flew
    above the fog and called out the way until they were in the sun again
climb | on a narrow ledge of a steep rock | {hn} climbed up without fear and brought it down | a
    high wall stood across the road | {n} jumped and jumped, but the wall was too high | {hn}
    climbed the wall and let down a rope for {n}
swim | at the bottom of a deep pond | {hn} took a deep breath, dived and came up with it | a wide
    river crossed the road | {n} put one foot into the water, but the river was too deep and too
    fast | {hn} swam across and pulled {n} over on a raft
dig | under a heap of earth and stones | {hn} dug as fast as the wind until it came to light | a
    hedge of sharp thorns blocked the road | {n} tried to push through, but the thorns were too
    sharp | {hn} dug a tunnel under the thorns and they both crept through
strong | under a heavy log | {hn} lifted the log with one push | a fallen tree blocked the road |
    {n} pushed and pulled, but the tree did not move | {hn} rolled the tree to the side as if it
    were a stick
small | deep inside a hollow log | {hn} crept into the log and pushed it out | an iron gate closed
    the road | {n} rattled at the gate, but it was locked | {hn} slipped between the bars and
    opened the gate from the other side
clever | at the bottom of a dry well | {hn} tied a hook to a long string and pulled it up | the
    road split into three, and there was no sign | {n} tried the first road, but it only led to a
    swamp | {hn} looked at the moss on the trees and knew which road was the right one
""")
}
GOALS = rows("""
see the sea | the sea | The water shone like silver and reached as far as the sky
climb the highest mountain | the top of the mountain | The whole land lay below, small and bright
visit the big city | the big city | There were towers, bright windows and more people than leaves
    on a tree
find the end of the rainbow | the end of the rainbow | There was no gold, only a meadow with
    flowers in seven colours
visit {his} grandmother | the house of {his} grandmother | There was hot soup on the table and a
    fire in the stove
find the old lighthouse | the old lighthouse | Its light turned slowly and painted the waves with
    gold
see the great waterfall | the great waterfall | The water thundered down and filled the air with
    rainbows
taste the honey of the far valley | the far valley | The honey there was as sweet as summer
find a hidden treasure | the place of the treasure | In the old chest lay seeds, books and a letter
    that said: share this
see the moon from close by | the highest hill in the land | The moon hung so low that it seemed to
    smile
""")
LESSONS = rows("""
swim | at the pond | sank like a stone and came up with weeds on {his} head | Breathe slowly and
    kick with your legs | crossed the pond without stopping
sing | in the meadow | made a sound like a rusty door | Listen first, and then sing softly | sang a
    song so sweet that even the wind stood still
whistle | by the fence | blew nothing but air | Wet your lips and blow gently | whistled a tune
    that was heard all over the hill
ride a bicycle | on the road to the mill | fell into the grass after three yards | Look ahead and
    keep moving | rode to the mill and back without a stop
bake bread | in the kitchen | burned the loaf until it was black | Give the dough time to rest |
    pulled a golden loaf out of the oven
read | under the lamp | saw only little black marks on the page | Take one letter after the other |
    read a whole page aloud
paint | at the window | spilled the blue paint over the floor | Look long and paint slowly |
    painted a picture of the hills at sunset
dance | on the village square | stepped on {his} own feet | Count to three and feel the music |
    danced the whole evening without a mistake
fly | on the hill | jumped from a box and fell into the grass | Not everyone has wings, but a big
    balloon can carry anyone | rose above the trees in the basket of a balloon and laughed for joy
juggle | in the yard | dropped all three balls | Begin with one ball, then take two | kept four
    balls in the air at once
fly a kite | on the hill | let the kite fall into a bush | Wait for the wind and then run | held a
    kite that stood high among the clouds
play the drum | behind the barn | made so much noise that the hens ran away | Start slowly and keep
    the beat | played the drum at the summer feast
cook soup | in the kitchen | put in so much salt that nobody could eat it | Taste often and add a
    little at a time | served a soup that warmed the whole table
""")
TROUBLES = rows("""
was stuck in the deep mud | a long rope | pulled on the arms of {hn}, but the mud held fast | tied
    the rope to a tree, and step by step {hn} came out
was shivering in the cold | a thick blanket | rubbed the hands of {hn}, but it did not help for
    long | wrapped {hn} in the blanket and made hot soup
had nothing left to eat | a basket of nuts and bread | looked for berries, but the bushes were bare
    | shared everything in the basket with {hn}
had lost the way in the dark | a lantern | shouted into the night, but the wind was too loud | held
    up the lantern until {hn} saw the light and came
had a sharp thorn in one foot | a small pair of tongs | pulled with bare hands, but the thorn did
    not move | took the tongs and drew out the thorn with one gentle pull
had a hole in the roof | a hammer and nails | put a pot under the hole, but the pot was soon full |
    climbed up and nailed new boards over the hole
was drifting away on a loose raft | a long pole | ran along the bank, but the water was faster |
    reached out with the pole and drew the raft to the shore
was afraid of the thunder | an old drum | spoke kind words, but the thunder was louder | played the
    drum along with the thunder until {hn} began to laugh
was sick in bed | a jar of honey and some herbs | brought cold water, but the cough did not stop |
    cooked tea with herbs and honey, and by morning {hn} was well
""")
CONTESTS = rows("""
race around the lake | fell into a ditch | ran as fast as the wind
kite contest on the hill | got tangled in the strings | let the kite climb higher and higher
soup contest in the village | burned one hand on the pot | cut carrots and stirred with great care
boat race on the river | ran onto a sandbank | rowed with all {his} might
drawing contest in the old barn | slipped on the wet paint | drew every leaf with great care
""")
SOUNDS = rows("""
a soft knocking | behind the barn | was trying to crack a nut in the dark
a strange humming | at the old well | was humming to keep up courage
a deep sigh | under the bridge | had missed the way home and was sad
a scratching sound | in the attic | was looking for a dry place to sleep
a thin whistle | in the hedge | was playing on a blade of grass
""")
PLANTS = rows("""
pumpkin seed | a dry wind came and the earth cracked | carried water from the river every evening |
    a pumpkin as big as a cart | pumpkin soup
apple seed | a frost came and covered everything with ice | wrapped the little tree in straw | a
    tree full of red apples | apple cake
sunflower seed | snails came and ate the leaves | picked off the snails one by one and took them to
    the meadow | a flower as tall as a house | fresh sunflower bread
bean | a storm bent the stem to the ground | tied the stem to a strong stick | more beans than
    anyone could count | bean soup
strawberry plant | rain fell for many days and the bed was full of water | dug a ditch to lead the
    water away | a whole basket of sweet strawberries | strawberry jam
""")
MORALS = {
    "friendship": ("a friend is worth more than gold", "everything is easier with a friend"),
    "helping": ("a little help can move a great stone", "those who ask for help will find it"),
    "courage": (
        "courage means to go on even when one is afraid",
        "the dark is full of small friends",
    ),
    "patience": ("good things take time", "those who practise and wait will win in the end"),
    "kindness": ("kindness always comes back", "a kind heart is better than a golden cup"),
    "sharing": ("joy that is shared is twice as big", "bread tastes best when it is shared"),
}

OPENINGS = phrases("""
    Once upon a time there lived {ak} named {n} {home}. |
    Once upon a time, {home}, there lived {ak} named {n}. |
    Once upon a time there was {ak} called {n} who lived {home}. |
    Long ago {ak} named {n} lived {home}. |
    There was once {ak} whose name was {n}. {He} lived {home}. | {n} was {ak} who lived {home}. |
    Far away, {home}, lived {ak} by the name of {n}.
""")
DETAILS = phrases("""
    Every morning {he} {habit}. | {He} loved {love} more than anything. |
    The {k} {habit} every day and loved {love}. | {n} had few things, but {he} had a good heart. |
""")
DREAMS = phrases("""
    {n} had one great wish: {he} wanted to {wish}. |
    More than anything else the {k} wanted to {wish}. |
    {n} dreamed of one thing only. {He} wanted to {wish}. |
    One {weather} {season} morning {n} said, "I want to {wishme}."
""")
MEETINGS = phrases("""
    On the road {he} met {ahk} named {hn}. | Just then {ahk} named {hn} came by. |
    Then {he} heard a friendly voice. It was {hn}, {ahk} from the next village. |
    After a while {ahk} came along. {hHis} name was {hn}.
""")
ASKS = phrases("""
    "Why do you look so sad?" asked {hn}. {n} told {hhim} everything. |
    "What is the matter?" asked the {hk}. "I want to {wishme}, but I cannot do it alone," said
    {n}. |
    "Can I help you?" asked {hn}. "Oh yes, please," said the {k}.
""")
OFFERS = phrases("""
    "Let us try it together," said {hn}. | "Two heads are better than one," said the {hk}. |
    "Do not give up," said {hn}. "I will help you."
""")
THANKS = phrases("""
    "Thank you, {hn}!" said {n}. "Without you I could not have done it." |
    {n} hugged {hn} and thanked {hhim} again and again. |
    "You are a true friend," said the {k}, and {hn} smiled. |
""")
ENDINGS = phrases("""
    From that day on {n} and {hn} were the best of friends. | And so {n} learned that {moral}. |
    That evening the {k} and the {hk} sat by the fire, and {n} knew that {moral}. |
    {n} never forgot that day, for {he} had learned that {moral}. |
    They went home under the stars, and both were happy.
""")

Beats = tuple[tuple[str, ...], ...]
SEEK: Beats = (
    phrases("""
        {n} owned a {colour} {obj}, and {he} loved it dearly, for it was a gift from {his}
        {giver}. |
        The dearest thing the {k} had was a {colour} {obj}. {His} {giver} had given it to {him}.
    """),
    phrases("""
        One {weather} {season} morning the {obj} was gone. |
        But one {weather} {season} day {n} could not find the {obj}.
    """),
    phrases("""
        "Oh no," said {n}. "Where is my {obj}?" | "I must find my {obj} before dark," said {n}. |
        The {k} sat down and almost cried.
    """),
    phrases("""
        {He} looked {s1}, but found only {t1}. | First {n} looked {s1} and found only {t1}.
    """),
    phrases("""
        Then {he} looked {s2}, but {he} saw nothing but {t2}. |
        Then the {k} searched {s2}, but {he} found only {t2}. |
    """),
    MEETINGS,
    ASKS,
    OFFERS,
    phrases("""
        They searched together, and at last they saw the {obj} {where}. |
        They followed the path into the woods. There lay the {obj}, {where}.
    """),
    phrases("""
        {n} could not reach it, but {fetch}. | So {fetch}. |
        "Leave that to me," said the {hk}, and {fetch}.
    """),
    phrases("""
        The {obj} was {colour} and bright as before. | {n} held the {obj} tight and laughed. |
    """),
)
JOURNEY: Beats = (
    DREAMS,
    phrases("""
        So {he} packed {food} and set out. |
        The next day {he} took {food} and began to walk. |
        The {k} put {food} into a bag and went on {his} way.
    """),
    phrases("""
        {He} walked over fields and hills and sang a little song. |
        The road was long, but {n} did not get tired. |
    """),
    ("But then {block}.", "Soon {block}.", "On the second day {block}."),
    ("{fail}.",),
    MEETINGS,
    ASKS,
    OFFERS,
    phrases("""
        So {opens}. | {opens}. | "I know what to do," said the {hk}, and {opens}.
    """),
    phrases("""
        Together they walked on, and in the evening they came to {place}. |
        At last they reached {place}. | Then they went on until they stood at {place}.
    """),
    ("{arrive}.",),
    phrases("""
        "It is even better than in my dreams," said {n}. |
        {n} was so happy that {he} could not speak. |
    """),
)
LEARN: Beats = (
    DREAMS,
    phrases("""
        {He} tried it {place}, but {he} {fail}. |
        The next day {he} tried it {place}, but {he} {fail}.
    """),
    phrases("""
        {He} tried again and again, and it was no better. | The crows laughed at {him}. |
    """),
    phrases("""
        "I will never learn it," said {n}. | {n} sat down and wanted to give up. |
        "It is too hard for me," said the {k}.
    """),
    MEETINGS,
    phrases("""
        "{advice}," said {hn}. "I will show you." | {hn} had an idea. "{advice}," said the {hk}. |
        "I can teach you," said {hn}. "{advice}."
    """),
    phrases("""
        They practised every day, in sun and in rain. |
        {n} practised for a week and did not give up. |
        Day after day they practised together {place}.
    """),
    phrases("""
        Then, one {weather} morning, {n} {win}. | And one day the {k} {win}. | At last {n} {win}.
    """),
    ("Everybody clapped.", '"I can do it!" cried {n}. "I can {wish}!"', ""),
)
HELP: Beats = (
    phrases("""
        One {weather} {season} day {he} went to see {his} friend {hn}, {ahk}. |
        {n} had a good friend, {ahk} named {hn}. | {His} best friend was {ahk} named {hn}.
    """),
    ("But that day {hn} {trouble}.", "One evening {hn} {trouble}."),
    phrases("""
        "Help me, {n}!" cried the {hk}. | "Oh dear," said {hn}. "What shall I do?"
    """),
    ("{n} {fail}.", "First {n} {fail}."),
    phrases("""
        Then {he} had an idea and ran home to fetch {tool}. |
        "Wait here," said the {k}, and {he} came back with {tool}.
    """),
    ("{n} {win}.", "Then {he} {win}."),
)
CONTEST: Beats = (
    phrases("""
        Every {season} there was a {contest}. | One {weather} {season} day there was a {contest}.
    """),
    phrases("""
        {n} wanted to win, and so did {hn}, {ahk} from the next village. |
        Everybody came, also {ahk} named {hn}, who had won the year before.
    """),
    phrases("""
        "You have no chance against me," said {hn}. | "I always win," said the {hk} and laughed.
    """),
    ("{n} {did}.", "The {k} said nothing and {did}."),
    phrases("""
        But suddenly {hn} {mishap} and cried for help. |
        Then {hn} {mishap}. "Help!" cried the {hk}.
    """),
    phrases("""
        {n} could have won, but {he} stopped and helped {hhim}. |
        The {k} did not think of the prize. {He} ran back and helped {hn}.
    """),
    phrases("""
        Somebody else won the prize, but nobody remembers who. |
        So they came in last, side by side. | They finished together, and everybody clapped.
    """),
    phrases("""
        "I am sorry that I laughed at you," said {hn}. |
        "You are better than any winner," said the {hk}.
    """),
)
PARTY: Beats = (
    phrases("""
        {His} best friend was {ahk} named {hn}. | {n} had a dear friend, {ahk} named {hn}.
    """),
    phrases("""
        One {weather} {season} day it was the birthday of {hn}. |
        Soon {hn} had {hhis} birthday, and it was {season}.
    """),
    phrases("""
        "I will bake a cake for {hhim}," said {n}. | {n} wanted to surprise {hhim} with a cake.
    """),
    phrases("""
        {He} got flour from the mill, eggs from the hen and honey from the bees. |
        {He} fetched flour, milk and sweet berries. |
        The {k} went to the market for flour, eggs and butter.
    """),
    phrases("""
        But on the way home {he} stumbled, and the {part} fell into the brook. |
        But a strong gust of wind blew the {part} away. |
        But when {he} came home, the {part} was gone.
    """),
    phrases("""
        {n} was sad for a moment. Then {he} asked the neighbours, and each of them gave a
        little. |
        "What now?" said {n}. A kind neighbour heard {him} and gave {him} what was missing.
    """),
    phrases("""
        The cake came out of the oven, round and golden. |
        In the evening the cake stood on the table, and it smelled of honey.
    """),
    phrases("""
        "Happy birthday, {hn}!" cried everybody. | {hn} blew out the candles, and they all sang.
    """),
)
SOUND: Beats = (
    phrases("""
        One {season} night {n} woke up and heard {sound} {place}. |
        In the middle of the night there was {sound} {place}, and {n} sat up in bed.
    """),
    phrases("""
        {n} was afraid and pulled the blanket over {his} head. | {His} heart beat like a drum.
    """),
    ("But the sound did not stop.", "There it was again.", ""),
    phrases("""
        At last {he} took a lantern and went out into the dark. |
        "I must know what it is," said the {k}, and {he} lit a lantern.
    """),
    phrases("""
        Step by step {he} went closer. | The shadows were long and the grass was wet. |
    """),
    phrases("""
        And what did {he} see? It was only {ahk} named {hn} who {cause}. |
        There sat {ahk}. "I am {hn}," said the {hk}. "Did I wake you?" {hHe} {cause}.
    """),
    phrases("""
        "I was so afraid of you," said {n}. "And I was afraid of you," said {hn}. Then both
        laughed. |
        {n} laughed. "Come in," {he} said. "There is warm milk on the stove."
    """),
)
GARDEN: Beats = (
    phrases("""
        One {weather} day {n} found {aseed} and planted it behind the house. |
        One day {n} got {aseed} from {his} {giver} and planted it in the garden.
    """),
    phrases("""
        Every day {he} looked, but there was only brown earth. |
        {n} waited one week, and then another week.
    """),
    phrases("""
        "Be patient," said {his} neighbour {hn}, {ahk}. |
        "It needs time," said {hn}, {ahk} who lived next door.
    """),
    phrases("""
        At last a small green leaf came out. |
        Then, after a night of rain, a green tip looked out of the earth.
    """),
    ("But then {harm}.", "But one night {harm}."),
    phrases("""
        {n} did not give up. With the help of {hn} {he} {care}. |
        {n} and {hn} worked hard. The {k} {care}.
    """),
    phrases("""
        When the time had come, there was {crop}. | Some months later there stood {crop}.
    """),
    phrases("""
        {n} and {hn} made {dish} and invited the whole village. |
        "Now we will have a feast," said {n}. They cooked {dish}, and everybody got some.
    """),
)
# plot: beats, theme, what the hero does in a request ("who ..."), a one-sentence summary
PLOTS: dict[str, tuple[Beats, str, tuple[str, ...], str]] = {
    "seek": (
        SEEK,
        "helping",
        phrases("""
            wants to find a lost {obj} | lost {his} {obj} | has lost {aobj} |
            looks for a lost {obj} | is looking for a {colour} {obj} | finds a lost {obj}
        """),
        "{n} the {k} lost a {colour} {obj} and found it again with the help of {hn} the {hk}.",
    ),
    "journey": (
        JOURNEY,
        "friendship",
        phrases("""
            wants to {wish} | dreams of {place} | goes to {place} | sets out to {wish} |
            wishes to {wish}
        """),
        "{n} the {k} wanted to {wish} and came to {place} with the help of {hn} the {hk}.",
    ),
    "learn": (
        LEARN,
        "patience",
        phrases("""
            wants to learn to {wish} | wants to {wish} | learns to {wish} | cannot {wish} |
            learns how to {wish}
        """),
        "{n} the {k} learned to {wish} because {hn} the {hk} taught {him}.",
    ),
    "help": (
        HELP,
        "kindness",
        phrases("""
            helps a friend | helps {ahk} | saves a friend | helps a friend in need
        """),
        "{hn} the {hk} {trouble}, and {n} the {k} helped with {tool}.",
    ),
    "contest": (
        CONTEST,
        "kindness",
        ("wants to win a race", "takes part in a contest", "wants to win"),
        "{n} the {k} stopped in the {contest} to help {hn} the {hk}.",
    ),
    "party": (
        PARTY,
        "sharing",
        ("bakes a cake", "bakes a cake for a friend", "plans a birthday party"),
        "{n} the {k} baked a birthday cake for {hn} the {hk}.",
    ),
    "sound": (
        SOUND,
        "courage",
        phrases("""
            hears a strange sound | is afraid of the dark | hears a noise at night
        """),
        "{n} the {k} heard {sound} in the night, and it was only {hn} the {hk}.",
    ),
    "garden": (
        GARDEN,
        "sharing",
        ("plants a seed", "plants {aseed}", "has a garden"),
        "{n} the {k} planted {aseed}, and in the end there was {crop}.",
    ),
}
TITLES = ("This is a story about {x}.", "Here is a story about {x}.")
REQUESTS = phrases("""
    Tell me a story about {x}. | Write a story about {x}. | Tell me a short story about {x}. |
    Write a short story about {x}. | Please tell me a story about {x}. |
    A story about {x}, please. | Can you tell me a story about {x}? |
    I want to hear a story about {x}. | Story about {x} |
    Could you write a little story about {x}? | Tell a tale about {x}. |
    Make up a story about {x}. | Give me a story about {x}. | Invent a short tale about {x}. |
    I would like a story about {x}. | Tell me a bedtime story about {x}. |
    Write me a story about {x}.
""")
BARE_REQUESTS = phrases("""
    Tell me a story. | Tell me a story | Write a story. | Can you tell me a story? |
    A story, please. | I want to hear a story. | Tell me a short story. |
    Please tell me a bedtime story. | Story please | Write a short story. | Tell me something. |
    Tell me another story. | Another one, please. | Once upon a time | Tell me a fairy tale. |
    Tell me another one. | Make up a story.
""")


def article(noun: str) -> str:
    """`a fox`, `an owl`, `a unicorn`."""
    is_an = noun[0].lower() in "aeiou" and not noun.startswith("uni")
    return f"{'an' if is_an else 'a'} {noun}"


def capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def invented_word(rng: random.Random) -> str:
    """A word nobody has seen: only copying it can get it right, so the model learns to copy."""
    syllables = (rng.choice("bdfgklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
    return "".join(syllables) + rng.choice(("", "n", "r", "k", "l", "x", "sh"))


@dataclass
class Story:
    """The facts of one story; `text()` tells them, `asked()` asks for them as well."""

    rng: random.Random
    plot: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng, facts = self.rng, self.facts
        self.plot = self.plot or rng.choice(tuple(PLOTS))
        season = rng.choice(tuple(SEASON_WEATHER))
        kind, helper = hero(rng), rng.choice(tuple(ABILITY))
        while helper == kind:
            helper = rng.choice(tuple(ABILITY))
        self._person("", kind, FEMALE, MALE)
        self._person("h", helper, HELPER_FEMALE, HELPER_MALE)
        adjective = rng.choice(ADJECTIVES) if rng.random() < 0.8 else ""
        facts |= {
            "adj": adjective,
            "ak": article(f"{adjective} {kind}".strip()),
            "ahk": article(helper),
            "home": rng.choice(HOMES),
            "habit": rng.choice(HABITS),
            "love": rng.choice(LOVES),
            "giver": rng.choice(GIVERS),
            "food": rng.choice(FOODS),
            "season": season,
            "weather": rng.choice(SEASON_WEATHER[season]),
            "moral": rng.choice(MORALS[PLOTS[self.plot][1]]),
        }
        self._plot_facts()

    def _person(self, prefix: str, kind: str, female: list[str], male: list[str]) -> None:
        """Name and pronouns; kinds that say it themselves (a queen, a boy) decide, else chance."""
        rng = self.rng
        is_she = kind in SHE or (kind not in HE and rng.random() < 0.5)
        he, him, his = ("she", "her", "her") if is_she else ("he", "him", "his")
        name = rng.choice(female if is_she else male)
        if not prefix and rng.random() < 0.1:
            name = capital(invented_word(rng))
        person = {"k": kind, "n": name, "he": he, "him": him, "his": his}
        person |= {"He": capital(he), "His": capital(his)}
        self.facts |= {prefix + key: word for key, word in person.items()}

    def _set(self, keys: str, row: tuple[str, ...]) -> None:
        self.facts |= dict(zip(keys.split(), (cell.format(**self.facts) for cell in row), strict=True))

    def _plot_facts(self) -> None:
        rng, facts = self.rng, self.facts
        where, fetch, block, fail, opens = SKILLS[ABILITY[facts["hk"]]]
        if self.plot == "seek":
            (s1, t1), (s2, t2) = rng.sample(SEARCHES, 2)
            row = (rng.choice(OBJECTS), rng.choice(COLOURS), s1, t1, s2, t2, where, fetch)
            self._set("obj colour s1 t1 s2 t2 where fetch", row)
            facts["aobj"] = article(facts["obj"])
            facts["wish"] = f"find {facts['his']} lost {facts['obj']}"
        elif self.plot == "journey":
            self._set("wish place arrive", rng.choice(GOALS))
            self._set("block fail opens", (block, fail, opens))
        elif self.plot == "learn":
            self._set("wish place fail advice win", rng.choice(LESSONS))
        elif self.plot == "help":
            self._set("trouble tool fail win", rng.choice(TROUBLES))
        elif self.plot == "contest":
            self._set("contest mishap did", rng.choice(CONTESTS))
        elif self.plot == "party":
            facts["part"] = rng.choice(("flour", "honey", "butter", "basket with the eggs"))
        elif self.plot == "sound":
            self._set("sound place cause", rng.choice(SOUNDS))
        else:
            self._set("seed harm care crop dish", rng.choice(PLANTS))
            facts["aseed"] = article(facts["seed"])
        facts["wishme"] = facts.get("wish", "").replace("his ", "my ").replace("her ", "my ")

    def say(self, options: tuple[str, ...]) -> str:
        """One of the alternatives with the facts filled in; a missing fact is a `KeyError`."""
        return capital(self.rng.choice(options).format(**self.facts))

    def text(self, subject: str = "") -> str:
        """The story; with a subject it begins by saying what it is about, as it was asked for. A small model
        learns to repeat that, and then to tell what it has just said."""
        thanks = THANKS if self.plot in ("seek", "journey", "learn") else ("",)
        beats = (OPENINGS, DETAILS, *PLOTS[self.plot][0], thanks, ENDINGS)
        sentences = [sentence for beat in beats if (sentence := self.say(beat))]
        if subject:
            sentences.insert(0, self.rng.choice(TITLES).format(x=subject))
        middle = self.rng.randint(4, 6)
        if self.rng.random() < 0.6:
            return " ".join(sentences)
        return " ".join(sentences[:middle]) + "\n\n" + " ".join(sentences[middle:])

    def subject(self) -> str:
        """What a request calls the story: always something that the story then contains."""
        facts, rng = self.facts, self.rng
        is_bare = rng.random() < 0.8
        subject = article(facts["k"] if is_bare else f"{facts['adj']} {facts['k']}".strip())
        way = rng.random()
        if way < 0.1:
            subject += rng.choice((" named ", " called ")) + facts["n"]
        if way < 0.25:
            return subject
        if way < 0.85:
            return f"{subject} who {rng.choice(PLOTS[self.plot][2]).format(**facts)}"
        if way < 0.93:
            return f"{subject} and {facts['ahk']}" + rng.choice(("", "", " who become friends"))
        extra = {"seek": "a {colour} {obj}", "journey": "{place}", "garden": "{aseed}"}
        return extra.get(self.plot, PLOTS[self.plot][1]).format(**facts)

    def asked(self) -> tuple[str, str]:
        """A request for this story, and the story."""
        if self.rng.random() < 0.1:
            return self.rng.choice(BARE_REQUESTS), self.text()
        subject = self.subject()
        told = self.text(subject if self.rng.random() < 0.9 else "")
        return self.rng.choice(REQUESTS).format(x=subject), told

    def questions(self) -> list[tuple[str, str]]:
        """Questions that the story answers, with the answers."""
        table = [
            ("What is the name of the {k}?", "The {k} is called {n}."),
            ("What was the name of the {k}?", "The name of the {k} was {n}."),
            ("Where did {n} live?", "{n} lived {home}."),
            ("Where did the {k} live?", "The {k} lived {home}."),
            ("Who was {hn}?", "{hn} was {ahk}."),
            ("Who was {n}?", "{n} was {ak}."),
            ("What kind of animal was {hn}?", "{hn} was {ahk}."),
            ("What happened in the story?", PLOTS[self.plot][3]),
            ("What is the story about?", PLOTS[self.plot][3]),
            ("Can you sum up the story?", PLOTS[self.plot][3]),
            ("Who is in the story?", "{n} the {k} and {hn} the {hk} are in the story."),
        ]
        if self.plot in ("seek", "journey", "learn"):
            table += [
                ("Who helped {n}?", "{hn} the {hk} helped {n}."),
                ("Who helped the {k}?", "The {hk} named {hn} helped the {k}."),
                ("What did {n} want?", "{n} wanted to {wish}."),
            ]
        if self.plot == "seek":
            table += [
                ("What did {n} lose?", "{n} lost a {colour} {obj}."),
                ("What colour was the {obj}?", "The {obj} was {colour}."),
                ("Where was the {obj}?", "The {obj} was {where}."),
            ]
        return [(ask.format(**self.facts), reply.format(**self.facts)) for ask, reply in table]


def hero(rng: random.Random) -> str:
    """Mostly animals, often beings of tales, sometimes rare or invented words."""
    chance = rng.random()
    if chance < 0.55:
        return rng.choice(ANIMALS)[0]
    if chance < 0.75:
        return rng.choice(BEINGS)
    if chance < 0.95:
        return rng.choice(RARE_HEROES)
    return invented_word(rng)
