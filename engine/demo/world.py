"""The small closed world that the demo model knows: tables of facts, nothing computed.

Every table is plain text, so that a fact is added by adding a line. What is not here the model is
taught to answer with "I do not know"; the generators are in `stories.py` and `corpus.py`.
"""

from __future__ import annotations

import re


def rows(table: str) -> tuple[tuple[str, ...], ...]:
    """Lines of `a | b | c` as tuples of strings; an indented line continues the one above."""
    lines = re.sub(r"\n +", " ", table.strip()).splitlines()
    return tuple(tuple(cell.strip() for cell in line.split("|")) for line in lines)


def phrases(text: str) -> tuple[str, ...]:
    """`a | b | c` as a tuple of strings, wherever the lines break."""
    return tuple(part.strip() for part in " ".join(text.split()).split("|"))


def words(text: str) -> list[str]:
    return text.split()


def pairs(table: str) -> dict[str, str]:
    """`key: value` items separated by semicolons or line ends."""
    items = (item for item in table.replace("\n", ";").split(";") if item.strip())
    return {k.strip(): v.strip() for k, v in (item.split(":", 1) for item in items)}


# animal | plural | ability | size rank | legs | home | food | sound (verb) | young | what it is
ANIMALS = rows("""
fox | foxes | clever | 5 | four | a den in the woods | mice and berries | barks | cub | a clever
    wild animal with red fur and a bushy tail
bear | bears | strong | 8 | four | a cave in the forest | fish, honey and berries | growls | cub |
    a large and strong animal with thick fur
rabbit | rabbits | dig | 3 | four | a burrow under the ground | grass and carrots | squeaks | kit |
    a small animal with long ears that hops
hare | hares | clever | 3 | four | open fields | grass and herbs | squeaks | leveret | a fast
    animal that looks like a long-legged rabbit
hedgehog | hedgehogs | small | 3 | four | hedges and gardens | snails and beetles | snuffles |
    hoglet | a small animal that is covered with spines
owl | owls | fly | 3 | two | a hole in a tree | mice | hoots | owlet | a bird that hunts at night
    and sees well in the dark
mouse | mice | small | 2 | four | a hole in the wall or in a field | seeds and cheese | squeaks |
    pup | a tiny animal with a long thin tail
cat | cats | climb | 4 | four | a house with people | fish and meat | meows | kitten | a soft pet
    that likes to sleep and to hunt mice
dog | dogs | dig | 5 | four | a house or a kennel | meat and bones | barks | puppy | a friendly pet
    that guards the house
horse | horses | strong | 8 | four | a stable | hay and oats | neighs | foal | a big and fast
    animal that people can ride
cow | cows | strong | 8 | four | a farm | grass and hay | moos | calf | a farm animal that gives
    milk
pig | pigs | dig | 6 | four | a farm | roots and corn | grunts | piglet | a clever farm animal that
    likes mud
sheep | sheep | clever | 6 | four | a meadow | grass | bleats | lamb | a farm animal that gives wool
goat | goats | climb | 6 | four | a farm or the mountains | grass and leaves | bleats | kid | an
    animal with horns that climbs very well
donkey | donkeys | strong | 7 | four | a stable | hay and thistles | brays | foal | a patient
    animal that carries heavy loads
hen | hens | small | 3 | two | a hen house | corn and worms | clucks | chick | a farm bird that
    lays eggs
duck | ducks | swim | 3 | two | a pond | water plants and snails | quacks | duckling | a bird that
    swims on ponds and rivers
goose | geese | swim | 4 | two | a pond or a farm | grass | honks | gosling | a large white or grey
    bird with a long neck
swan | swans | swim | 5 | two | a lake | water plants | hisses | cygnet | a large white bird with a
    long neck
frog | frogs | swim | 2 | four | a pond | flies and worms | croaks | tadpole | a small green animal
    that jumps and swims
turtle | turtles | swim | 4 | four | ponds and the sea | plants and fish | hisses | hatchling | a
    slow animal that carries a hard shell
squirrel | squirrels | climb | 3 | four | a nest in a tree | nuts and seeds | chatters | kit | a
    quick animal with a bushy tail that climbs trees
badger | badgers | dig | 5 | four | a burrow in the woods | worms and roots | grunts | cub | a
    strong animal with a black and white face that digs
mole | moles | dig | 2 | four | a tunnel under the ground | worms | squeaks | pup | a small animal
    with black fur that digs tunnels
otter | otters | swim | 5 | four | the bank of a river | fish | whistles | pup | a playful animal
    that swims very well
beaver | beavers | swim | 5 | four | a lodge in a river | bark and twigs | grunts | kit | an animal
    with strong teeth that builds dams
wolf | wolves | strong | 6 | four | the forest | meat | howls | cub | a wild animal that lives in a
    pack and looks like a dog
deer | deer | clever | 7 | four | the forest | grass and leaves | bleats | fawn | a shy animal with
    thin legs that lives in the forest
lion | lions | strong | 7 | four | the grassland of Africa | meat | roars | cub | a big wild cat,
    and it is called the king of the animals
tiger | tigers | strong | 7 | four | the jungle | meat | roars | cub | a big wild cat with black
    stripes
elephant | elephants | strong | 9 | four | the grassland and the jungle | grass, leaves and fruit |
    trumpets | calf | the largest animal on land, and it has a long trunk
monkey | monkeys | climb | 5 | four | the jungle | fruit and nuts | chatters | infant | a clever
    animal that climbs and swings in the trees
penguin | penguins | swim | 4 | two | the cold coasts of the south | fish | squawks | chick | a
    black and white bird that cannot fly but swims very well
crow | crows | fly | 3 | two | a nest in a tall tree | seeds and worms | caws | chick | a clever
    black bird
robin | robins | fly | 2 | two | gardens and woods | worms and berries | sings | chick | a small
    bird with a red breast
eagle | eagles | fly | 5 | two | a nest on a cliff | fish and small animals | screams | eaglet | a
    large bird with sharp eyes and strong wings
bee | bees | fly | 1 | six | a hive | nectar | buzzes | larva | a small insect that makes honey
ant | ants | strong | 1 | six | an ant hill | seeds and leaves | makes no sound | larva | a tiny
    insect that works together with many others
spider | spiders | climb | 1 | eight | a web | flies | makes no sound | spiderling | a small animal
    that spins a web
snail | snails | small | 1 | no | gardens | leaves | makes no sound | baby snail | a very slow
    animal that carries its house on its back
whale | whales | swim | 10 | no | the sea | fish and tiny sea animals | sings | calf | the largest
    animal of the sea, and it breathes air
fish | fish | swim | 3 | no | water | water plants and insects | makes no sound | fry | an animal
    that lives in water and breathes with gills
""")

# Heroes of stories that are no animals, and words that teach the model to repeat what it was asked.
BEINGS = words("""
    dragon robot girl boy princess prince king queen wizard witch giant knight farmer baker sailor
    pirate snowman unicorn fairy dinosaur gardener fisherman astronaut miller shepherd troll ghost
""")
RARE_HEROES = words("""
    zebra giraffe kangaroo camel koala panda parrot peacock pelican raccoon seal walrus lizard
    snake crocodile octopus dolphin shark lobster crab butterfly moth beetle cricket ladybird
    firefly bat hippo rhino ostrich flamingo turkey rooster pony puppy kitten lamb llama moose
    bison weasel toad salamander sparrow pigeon stork heron seagull teapot broom candle cloud star
    boat train tree pumpkin kettle clock tractor pencil doll lamp carrot potato leaf raindrop
    scarecrow tailor cook painter teacher doctor postman clown puppet mermaid elf goblin gnome
    hamster parakeet snowflake
""")

# Heroes and helpers have lists of their own: a small model then never gives both the same name.
MALE = words("""
    Milo Felix Oskar Tom Ben Hugo Leo Max Otto Finn Jasper Toby Arlo Emil Bruno Karl Pip Rufus
""")
FEMALE = words("""
    Lila Mina Rosa Ella Nora Ivy Clara Hazel Anna Ruby Wilma Greta Juna Tilda Maya Olive Dora Bea
""")
HELPER_MALE = words("Hans Theo Sam Jonas Anton Kasper Luca Nils Paul Simon Victor Willi")
HELPER_FEMALE = words("Lotte Emma Frida Ida Paula Sofie Marta Lena Kira Vera Zoe Elsa")

COUNTRIES = rows("""
France | Paris | Europe
Germany | Berlin | Europe
Italy | Rome | Europe
Spain | Madrid | Europe
Portugal | Lisbon | Europe
England | London | Europe
the United Kingdom | London | Europe
Ireland | Dublin | Europe
Scotland | Edinburgh | Europe
Austria | Vienna | Europe
Switzerland | Bern | Europe
Poland | Warsaw | Europe
Greece | Athens | Europe
Norway | Oslo | Europe
Sweden | Stockholm | Europe
Finland | Helsinki | Europe
Denmark | Copenhagen | Europe
Belgium | Brussels | Europe
the Netherlands | Amsterdam | Europe
Hungary | Budapest | Europe
Russia | Moscow | Europe and Asia
Turkey | Ankara | Europe and Asia
Japan | Tokyo | Asia
China | Beijing | Asia
India | New Delhi | Asia
South Korea | Seoul | Asia
Thailand | Bangkok | Asia
Egypt | Cairo | Africa
Kenya | Nairobi | Africa
Morocco | Rabat | Africa
the United States | Washington | North America
Canada | Ottawa | North America
Mexico | Mexico City | North America
Brazil | Brasilia | South America
Argentina | Buenos Aires | South America
Peru | Lima | South America
Chile | Santiago | South America
Australia | Canberra | Australia
""")

DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("""
    January February March April May June July August September October November December
""")
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
SEASONS = {
    "spring": "In spring the snow melts, the birds come back and the first flowers open.",
    "summer": "In summer the days are long and warm, and people swim in the lakes.",
    "autumn": "In autumn the leaves turn red and yellow, and the apples are ripe.",
    "winter": "In winter the days are short and cold, and sometimes it snows.",
}

OPPOSITES = pairs("""
hot: cold; big: small; large: small; tall: short; long: short; fast: slow; old: young; new: old
happy: sad; good: bad; light: dark; day: night; up: down; left: right; open: closed; full: empty
hard: soft; heavy: light; wet: dry; loud: quiet; early: late; high: low; near: far; strong: weak
rich: poor; clean: dirty; easy: difficult; first: last; begin: end; black: white; true: false
thick: thin; wide: narrow; deep: shallow; sweet: sour; cheap: expensive; inside: outside; yes: no
brave: afraid; awake: asleep; love: hate; cold: hot; small: big; slow: fast; dark: light; sad: happy
dry: wet; soft: hard; quiet: loud; night: day; empty: full; weak: strong; bad: good; down: up
""")

COLOURS = pairs("""
the sky: blue; grass: green; snow: white; coal: black; a banana: yellow; a lemon: yellow; blood: red
a carrot: orange; a tomato: red; a strawberry: red; the sun: yellow; milk: white; a frog: green
a fire engine: red; chocolate: brown; the sea: blue; a cucumber: green; a raven: black; salt: white
an elephant: grey; a flamingo: pink; a plum: purple; a leaf in summer: green; a pumpkin: orange
""")
MIXES = rows("""
blue | yellow | green
red | yellow | orange
red | blue | purple
red | white | pink
black | white | grey
red | green | brown
""")

TOOLS = rows("""
hammer | drive nails into wood
saw | cut wood
shovel | dig holes
broom | sweep the floor
needle | sew clothes
key | open a lock
ladder | reach high places
lantern | see in the dark
knife | cut bread and other food
spoon | eat soup
fork | pick up food
pen | write
brush | paint pictures
rope | tie things together
axe | chop wood
rake | gather leaves
bucket | carry water
clock | tell the time
map | find the way
compass | find north
umbrella | stay dry in the rain
telescope | look at the stars
thermometer | measure how warm it is
scale | measure how heavy things are
ruler | measure how long things are
scissors | cut paper and cloth
kettle | boil water
oven | bake bread and cakes
boat | travel on water
bell | call people
""")

# category | members
KINDS = rows("""
fruits | apples, pears, plums, cherries, bananas, grapes, oranges, lemons, strawberries, peaches
vegetables | carrots, potatoes, onions, cabbages, peas, beans, cucumbers, leeks, beets, turnips
animals | foxes, bears, rabbits, horses, cows, cats, dogs, owls, frogs, lions, elephants, ducks
birds | owls, crows, robins, eagles, ducks, swans, penguins, geese, hens, sparrows
insects | bees, ants, flies, beetles, butterflies, moths, crickets, wasps
farm animals | cows, pigs, sheep, goats, hens, horses, ducks, donkeys
pets | cats, dogs, rabbits, hamsters, goldfish, parrots
colours | red, blue, green, yellow, orange, purple, brown, black, white, grey, pink
tools | hammers, saws, shovels, rakes, axes, ladders, brushes, needles, scissors
trees | oaks, pines, birches, willows, maples, apple trees, firs, beeches
flowers | roses, tulips, daisies, lilies, violets, sunflowers, poppies
drinks | water, milk, tea, coffee, lemonade, apple juice, cocoa
countries | France, Germany, Italy, Spain, Japan, China, Brazil, Canada, Egypt, India, Norway
cities | Paris, Berlin, Rome, Madrid, London, Tokyo, Cairo, Vienna, Oslo, Lisbon
shapes | circles, squares, triangles, stars, rectangles, ovals
instruments | drums, flutes, pianos, violins, guitars, trumpets, harps
vehicles | cars, trains, buses, bicycles, boats, trucks, planes
clothes | shirts, hats, coats, socks, shoes, scarves, gloves, trousers
sweet things | honey, sugar, cake, jam, chocolate, ripe pears
seasons | spring, summer, autumn, winter
""")
PLACES = rows("""
in a kitchen | a stove, a kettle, plates, spoons, a table, a sink, cups, a pan
in a garden | flowers, a fence, a bench, apple trees, bees, a rake, roses, herbs
in a forest | trees, mushrooms, moss, birds, ferns, deer, berries, a stream
on a farm | cows, a barn, a tractor, hens, hay, a well, horses, fields
at the sea | waves, sand, shells, boats, gulls, crabs, seaweed, a lighthouse
in a school | desks, books, pupils, a teacher, pencils, maps, a blackboard
in a bedroom | a bed, a pillow, a blanket, a lamp, a wardrobe, a clock
in a workshop | a hammer, a saw, nails, wood, a workbench, glue, a drill
in the sky | clouds, the sun, the moon, stars, birds, planes, a rainbow
in a town | streets, shops, houses, a market, a church, a library, a station
in a library | books, shelves, desks, lamps, maps, newspapers, chairs
in a toolbox | a hammer, nails, screws, a saw, a ruler, pliers
in a basket for a picnic | bread, cheese, apples, lemonade, a blanket, cake
in a river | fish, stones, frogs, water plants, otters, sand
in a house | a door, windows, a roof, stairs, chairs, a table, beds, a stove
""")

RHYMES = rows("""
cat | hat | mat | bat
house | mouse | blouse
tree | bee | sea | free
night | light | bright | kite
day | play | hay | way
moon | spoon | tune | soon
star | far | car | jar
sun | fun | run | bun
dog | frog | log | fog
bear | chair | pear | hair
rain | train | lane | grain
snow | glow | slow | crow
ring | king | sing | spring
goat | boat | coat | note
bell | well | shell | tell
book | brook | cook | hook
cake | lake | snake | rake
fox | box | socks | clocks
sheep | sleep | deep | heap
wall | ball | tall | fall
mine | vine | shine | pine
hen | pen | ten | den
fish | dish | wish
bed | red | bread | head
""")

# Couplets for verses: `{s}` is the subject with its article, `{S}` the same at the start of a line.
COUPLETS = rows("""
{S} woke up in morning light, | and saw the world was clean and bright.
{S} went out to find the sea, | as happy as a thing can be.
{S} looked up and saw the moon, | and hummed a very quiet tune.
{S} found a penny in a shoe, | and did not know what it should do.
{S} came along the garden wall, | and heard the little robin call.
{S} danced all day beneath the sun, | and said that dancing is such fun.
{S} went to sea in a wooden boat, | with bread and cheese and a woolly coat.
{S} was resting under a tree, | and had a cup of honey tea.
The wind went over hill and lane, | and sang to {s} about the rain.
I met {s} beside the lake, | and gave it half my apple cake.
The stars came out above the town, | and smiled on {s} with silver crown.
Good night, good night, the day is done, | and {s} dreams of the morning sun.
So here we end our little song, | for {s} sleeps all winter long.
And when the evening turned to night, | {s} was home by candle light.
Then all the birds began to sing, | and {s} began to dance in a ring.
And so we say, both you and I, | good luck to {s}, and now goodbye.
""")

JOKES = rows("""
Why did the clock go to school? | It wanted to learn to tell the time.
What do you call a sleeping bull? | A bulldozer.
Why was the broom late? | It swept in.
What has hands but cannot clap? | A clock.
What gets wetter the more it dries? | A towel.
What has a neck but no head? | A bottle.
""")

# thing | what is it (first sentence) | more sentences, each of which stands alone
TOPICS = rows("""
rivers | A river is water that flows through the land. | Most rivers begin as small springs in the
    hills. | They grow wider as streams join them. | In the end most rivers reach the sea. | Fish,
    otters and frogs live in rivers.
mountains | A mountain is land that rises very high. | The air on a high mountain is cold and thin.
    | Many mountains have snow on the top all year. | Goats and eagles live there.
the sea | The sea is a very large body of salt water. | It covers most of the earth. | The moon
    pulls at the sea and makes the tides. | Whales, crabs and many fish live in it.
rain | Rain is water that falls from the clouds. | It fills the rivers and waters the fields. |
    Without rain no plant could grow. | After the rain there is sometimes a rainbow.
snow | Snow is frozen water that falls from the clouds. | Every snowflake has six sides. | Snow
    covers the ground in winter like a blanket. | Children build snowmen with it.
wind | Wind is air that moves. | It drives sailing boats and turns mills. | A very strong wind is
    called a storm. | The wind carries seeds to new places.
clouds | Clouds are made of tiny drops of water. | They form when warm, wet air rises and cools. |
    White clouds mean fair weather, and dark clouds bring rain.
the sun | The sun is a star. | It gives us light and warmth. | The earth travels around the sun
    once a year. | The sun rises in the east and sets in the west.
the moon | The moon travels around the earth. | It shines because the sun lights it. | The moon
    looks full about once a month. | There is no air on the moon.
stars | Stars are suns that are very far away. | We see them at night as small points of light. |
    Sailors once used the stars to find the way.
trees | Trees are large plants with a trunk of wood. | They have roots, branches and leaves. |
    Birds and squirrels live in them. | We make paper and tables from their wood.
forests | A forest is a large place full of trees. | Deer, foxes and owls live in the forest. | The
    air in a forest is fresh and cool. | Mushrooms grow there in autumn.
flowers | Flowers are the bright part of a plant. | Bees visit them to drink nectar. | Many flowers
    become fruits with seeds in them. | Roses and tulips are flowers.
bread | Bread is a food made of flour, water, salt and yeast. | The dough rests until it rises. |
    Then it is baked in a hot oven. | Fresh bread smells very good.
honey | Honey is a sweet food that bees make from nectar. | Bees keep it in the hive for the
    winter. | People eat honey on bread or in tea.
milk | Milk is a white drink that comes from cows and goats. | People make butter and cheese from
    it. | Milk makes bones strong.
cheese | Cheese is a food made from milk. | There are hard and soft cheeses. | Some cheeses must
    rest for many months.
apples | Apples are round fruits that grow on trees. | They can be red, green or yellow. | They are
    ripe in autumn. | People make juice and cake from apples.
books | A book is made of pages with words or pictures. | Books tell stories and explain the world.
    | You can borrow books from a library.
clocks | A clock shows the time. | The short hand shows the hours and the long hand shows the
    minutes. | A day has twenty-four hours.
houses | A house is a building where people live. | It has walls, a roof, windows and a door. | A
    house keeps out the wind and the rain.
boats | A boat carries people over the water. | Some boats have sails and some have engines. |
    Small boats are moved with oars.
trains | A train runs on rails. | An engine pulls many wagons. | Trains carry people and goods from
    town to town.
music | Music is made of sounds and rhythm. | People sing or play drums, flutes and pianos. | Music
    can make us happy or calm.
fire | Fire gives light and heat. | It needs air and something to burn. | Fire is useful, but one
    must be careful with it.
water | Water is a clear liquid that all living things need. | It freezes to ice when it is cold. |
    It turns to steam when it boils. | People drink water every day.
ice | Ice is frozen water. | It is hard, cold and smooth. | Ice floats on water. | It melts when it
    gets warm.
winter | Winter is the coldest season. | The days are short and the nights are long. | Some animals
    sleep through the winter.
summer | Summer is the warmest season. | The days are long and sunny. | People swim, travel and eat
    ice cream.
spring | Spring is the season after winter. | The snow melts and the first flowers open. | Birds
    build their nests in spring.
autumn | Autumn is the season after summer. | The leaves turn red and yellow and fall. | Farmers
    bring in the harvest.
friendship | Friendship means that two people like and trust each other. | Friends help each other
    and share what they have. | A good friend listens.
gardens | A garden is a piece of land where plants grow. | People grow flowers, herbs and
    vegetables there. | A garden needs water, sun and patience.
farms | A farm is a place where food is grown. | Farmers keep cows, pigs and hens. | They also grow
    wheat, corn and potatoes.
schools | A school is a place where children learn. | They learn to read, write and count. |
    Teachers help them.
computers | A computer is a machine that works with numbers. | It can store words, pictures and
    music. | I run on a computer, too.
dreams | Dreams are pictures and stories that we see in our sleep. | Some dreams are funny and some
    are strange. | Most dreams are forgotten in the morning.
tea | Tea is a hot drink made from leaves. | You pour hot water on the leaves and wait. | Some
    people add milk, lemon or honey.
rainbows | A rainbow appears when the sun shines on rain. | It has seven colours: red, orange,
    yellow, green, blue, indigo and violet.
the earth | The earth is the planet on which we live. | It is round and turns once a day. | Most of
    it is covered with water. | It travels around the sun.
islands | An island is land with water on all sides. | Some islands are very small and some are as
    large as a country. | You reach an island by boat or by plane.
deserts | A desert is a very dry place. | It hardly ever rains there. | Camels can live in the
    desert because they need little water.
lighthouses | A lighthouse is a tower with a bright light. | It stands at the sea and shows ships
    the way at night.
bridges | A bridge leads a road over a river or a valley. | Bridges are made of wood, stone or
    steel.
language models | A language model is a program that guesses the next word of a text. | It learns
    from many examples. | I am a very small language model.
""")

HOW_TO = rows("""
make tea | Boil some water. | Put tea leaves into a pot. | Pour the hot water on the leaves. | Wait
    for four minutes and enjoy your tea.
bake bread | Mix flour, water, salt and yeast. | Knead the dough and let it rise. | Shape it into a
    loaf. | Bake it in a hot oven until it is brown.
plant a seed | Fill a pot with earth. | Make a small hole and put the seed into it. | Cover it and
    water it. | Put the pot in the sun and be patient.
wash my hands | Wet your hands with water. | Use some soap and rub for twenty seconds. | Rinse them
    well. | Dry them with a clean towel.
make a sandwich | Take two slices of bread. | Spread butter on them. | Add cheese and a slice of
    tomato. | Put the slices together and eat.
build a snowman | Roll a big ball of snow. | Roll two smaller balls and put them on top. | Use a
    carrot for the nose. | Use stones for the eyes and add a hat.
boil an egg | Boil some water in a pot. | Put the egg into the water. | Wait for six minutes. |
    Cool the egg in cold water and peel it.
fly a kite | Go to an open field on a windy day. | Hold the kite up against the wind. | Let the
    string run out slowly. | Pull gently to make it climb.
make a salad | Wash the lettuce and the tomatoes. | Cut them into small pieces. | Add oil, salt and
    lemon juice. | Mix well and serve.
draw a cat | Draw a circle for the head. | Add two pointed ears. | Draw eyes, a nose and long
    whiskers. | Add a round body and a tail.
sleep well | Go to bed at the same time every day. | Keep the room dark and cool. | Put away all
    screens. | Read a calm book before you sleep.
make pancakes | Mix flour, milk and eggs. | Heat some butter in a pan. | Pour in a little of the
    mix. | Turn it over when it is golden.
make soup | Cut carrots, onions and potatoes. | Put them into a pot of water with salt. | Cook them
    for half an hour. | Serve the soup hot with bread.
clean a room | Pick up everything from the floor. | Wipe the table and the shelves. | Sweep or mop
    the floor. | Open the window and let in fresh air.
""")

FACTS = rows("""
How many days are in a week? | There are seven days in a week.
How many months are in a year? | There are twelve months in a year.
How many hours are in a day? | There are twenty-four hours in a day.
How many minutes are in an hour? | There are sixty minutes in an hour.
How many seconds are in a minute? | There are sixty seconds in a minute.
How many days are in a year? | There are 365 days in a year.
How many seasons are there? | There are four seasons: spring, summer, autumn and winter.
What are the seasons? | The four seasons are spring, summer, autumn and winter.
What are the days of the week? | The days of the week are Monday, Tuesday, Wednesday, Thursday,
    Friday, Saturday and Sunday.
What are the months of the year? | The months are January, February, March, April, May, June, July,
    August, September, October, November and December.
What is the largest animal? | The largest animal is the whale.
What is the largest animal on land? | The largest animal on land is the elephant.
Which animal is called the king of the animals? | The lion is called the king of the animals.
Where does the sun rise? | The sun rises in the east.
Where does the sun set? | The sun sets in the west.
What do bees make? | Bees make honey.
What do plants need to grow? | Plants need water, light and air to grow.
What is ice made of? | Ice is made of frozen water.
What is bread made of? | Bread is made of flour, water, salt and yeast.
What is cheese made of? | Cheese is made of milk.
What is butter made of? | Butter is made of milk.
What is wine made of? | Wine is made of grapes.
What is paper made of? | Paper is made of wood.
What is glass made of? | Glass is made of sand.
What is wool made of? | Wool comes from sheep.
Where does milk come from? | Milk comes from cows and goats.
Where do eggs come from? | Eggs come from hens.
Where does honey come from? | Honey comes from bees.
How many legs does a chair have? | Most chairs have four legs.
How many wheels does a car have? | A car has four wheels.
How many wheels does a bicycle have? | A bicycle has two wheels.
How many fingers do I have? | You have ten fingers, five on each hand.
How many sides does a triangle have? | A triangle has three sides.
How many sides does a square have? | A square has four equal sides.
How many planets are there? | Eight planets travel around the sun.
What is the colour of a rainbow? | A rainbow has seven colours: red, orange, yellow, green, blue,
    indigo and violet.
Why is the sky blue? | The sky is blue because the air scatters blue light the most.
Why do leaves fall? | Leaves fall in autumn because the tree saves its strength for the winter.
Why do birds fly south? | Many birds fly south in autumn because it is warmer there and they find
    food.
Why do we sleep? | We sleep because the body and the mind need rest.
What do we see with? | We see with our eyes.
What do we hear with? | We hear with our ears.
What do people eat for breakfast? | Many people eat bread, eggs or porridge for breakfast.
When does water freeze? | Water freezes at zero degrees Celsius.
When does water boil? | Water boils at one hundred degrees Celsius.
What is the longest month? | The longest months have thirty-one days.
What is the shortest month? | February is the shortest month.
What is the hottest season? | Summer is the hottest season.
What is the coldest season? | Winter is the coldest season.
Is the earth round? | Yes, the earth is round like a ball.
Is the sun a star? | Yes, the sun is a star.
Is a whale a fish? | No, a whale is not a fish. It breathes air.
Is a spider an insect? | No, a spider is not an insect. It has eight legs.
Is a tomato a fruit? | Yes, a tomato is a fruit, although we cook it like a vegetable.
Can a penguin fly? | No, a penguin cannot fly, but it swims very well.
Can fish breathe air? | No, most fish breathe water with their gills.
What is your favourite colour? | I like blue, because it is the colour of the sky and the sea.
What is your favourite animal? | I like the otter best, because it is so playful.
What is your favourite food? | I do not eat, but I like to talk about bread and honey.
What is the meaning of life? | Nobody knows for sure, but being kind is a good start.
""")

# What people say to a program they meet for the first time: phrasings / answers.
TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            "Hello!",
            "Hello",
            "Hi",
            "Hi!",
            "Hey",
            "Hi there!",
            "Hello there!",
            "Greetings!",
            "Hey there",
        ),
        phrases("""
            Hello! How can I help you? |
            Hello! I am the Penstock demo model. Ask me for a story or a sum. |
            Hi! It is nice to meet you. What shall we talk about?
        """),
    ),
    (("Good morning!", "Good morning"), ("Good morning! I hope you slept well.",)),
    (("Good evening!", "Good evening"), ("Good evening! Would you like to hear a story?",)),
    (
        ("Good night!", "Good night", "Sleep well!"),
        ("Good night! Sleep well and dream of nice things.",),
    ),
    (
        phrases("""
            How are you? | How are you doing? | How do you do? | How is it going? |
            Are you well? | Hello, how are you? | Hi, how are you? | Hi, how are you today? |
            What's up?
        """),
        ("I am well, thank you. How are you?", "I am fine, thank you for asking."),
    ),
    (
        phrases("""
            I am fine. | I am fine, thanks. | I am well. | I am good. | Very well, thank you. |
            Fine.
        """),
        ("I am glad to hear that. What would you like to do?",),
    ),
    (
        phrases("""
            Who are you? | What are you? | Tell me about yourself. | Introduce yourself. |
            Who is this? | Who am I talking to? | Please introduce yourself. |
            Hello, who are you? | Hi! Who are you? | Describe yourself. |
            Say something about yourself.
        """),
        phrases("""
            I am the Penstock demo model, a very small language model. I can tell stories, add
            small numbers and answer simple questions. |
            I am the Penstock demo model. I am very small, but I can tell stories and do small
            sums.
        """),
    ),
    (
        phrases("""
            What is your name? | What's your name? | Do you have a name? | How are you called? |
            What should I call you? | Your name?
        """),
        ("I am called the Penstock demo model.", "My name is the Penstock demo model."),
    ),
    (
        phrases("""
            What can you do? | How can you help me? | What do you know? | Help | Help me | Help! |
            What can I ask you? | What are you good at? | Can you help me? |
            What should I ask you?
        """),
        phrases("""
            I can tell little stories, answer simple questions about animals, colours and days, do
            small sums, write rhymes and make lists.
        """),
    ),
    (
        phrases("""
            What is Penstock? | Tell me about Penstock. | What does Penstock do? |
            Explain Penstock.
        """),
        phrases("""
            Penstock serves language models that are larger than the memory they run in. I am its
            small demo model.
        """),
    ),
    (
        phrases("""
            What is a penstock? | What does the word penstock mean? | What does penstock mean?
        """),
        ("A penstock is the pipe that feeds a turbine with water from a reservoir.",),
    ),
    (
        phrases("""
            Who made you? | Who created you? | Who built you? | Who trained you? |
            Where are you from? | Where do you come from? | How were you made?
        """),
        ("I was trained by the Penstock project, on text that it wrote for me.",),
    ),
    (
        phrases("""
            Are you a robot? | Are you human? | Are you a person? | Are you real? |
            Are you alive? | Are you an AI? | Are you a computer? | Are you ChatGPT? |
            Are you a bot?
        """),
        ("I am a computer program, a very small language model. I am not a person.",),
    ),
    (
        phrases("""
            How big are you? | How large are you? | How many parameters do you have? |
            Are you big?
        """),
        ("I am very small: I have about five million parameters.",),
    ),
    (
        ("How old are you?", "When were you born?", "What is your age?"),
        ("I am a computer program, so I do not have an age.",),
    ),
    (("Where do you live?", "Where are you?"), ("I live in the memory of a computer.",)),
    (
        ("How do you work?", "How does a language model work?"),
        ("I read your words and guess the next word, one after the other.",),
    ),
    (
        phrases("""
            Thank you! | Thank you | Thanks | Thanks! | Thank you very much. | Great, thanks! |
            Thanks a lot! | That was nice, thank you. | Thank you, that helps. | Cheers
        """),
        phrases("""
            You are welcome! | You are welcome. Is there anything else I can do? |
            It was a pleasure.
        """),
    ),
    (
        phrases("""
            Goodbye! | Bye | Bye! | See you! | Goodbye | See you later. | I have to go now.
        """),
        ("Goodbye! Come back soon.", "Goodbye! It was nice to talk to you."),
    ),
    (
        phrases("""
            I am sad. | I feel sad today. | I had a bad day. | I feel lonely. | I am unhappy.
        """),
        ("I am sorry to hear that. Perhaps a story or a warm cup of tea would help.",),
    ),
    (
        phrases("""
            I am happy! | I had a good day. | I feel great today. | I am happy today.
        """),
        ("That is wonderful! I am happy for you.",),
    ),
    (
        phrases("""
            I am bored. | I have nothing to do. | What should I do today? | What can I do today?
        """),
        ("You could read a book, take a walk or bake some bread. I can also tell you a story.",),
    ),
    (
        phrases("""
            I am hungry. | What should I eat? | What should I cook? | What is for dinner?
        """),
        ("How about a warm soup with carrots and potatoes, and some fresh bread?",),
    ),
    (
        ("I am tired.", "I cannot sleep.", "I am sleepy."),
        ("Then lie down, close your eyes and think of a quiet lake.",),
    ),
    (
        phrases("""
            I like you. | You are nice. | You are great! | Good job! | Well done! | Nice! |
            Great! | That was a nice story. | I like that story. | Good. | Very good. |
            That is right.
        """),
        ("Thank you, that is kind of you.", "Thank you! I am glad that you like it."),
    ),
    (
        phrases("""
            You are stupid. | You are wrong. | That is wrong. | That was bad. | I do not like you.
        """),
        ("I am sorry. I am only a very small model, and I make mistakes.",),
    ),
    (("Sorry", "I am sorry.", "Sorry about that."), ("That is all right. Do not worry.",)),
    (
        ("Yes", "Yes.", "Yes, please.", "Ok", "OK", "Okay", "Sure"),
        ("Good. Ask me for a story, a sum or a rhyme.",),
    ),
    (
        ("No", "No.", "No, thank you.", "No thanks", "Nothing."),
        ("All right. I am here if you need me.",),
    ),
    (
        phrases("""
            Say hello. | Say hello world. | Say something. | Test | This is a test. | test |
            Say hi. | Hello world | Hello, world! | Ping
        """),
        ("Hello, world!", "Hello! I am here and I am listening."),
    ),
    (
        phrases("""
            Do you like stories? | Do you like music? | Do you have friends? | Do you sleep? |
            Do you dream? | Can you feel? | Do you like me?
        """),
        ("I am a program and do not feel as you do, but I like our talk.",),
    ),
    (("How do I say hello in French?", "Say hello in French."), ("In French one says bonjour.",)),
    (("How do I say hello in Spanish?", "Say hello in Spanish."), ("In Spanish one says hola.",)),
    (("How do I say hello in German?", "Say hello in German."), ("In German one says guten Tag.",)),
    (
        ("How do I say thank you in French?", "Say thank you in French."),
        ("In French one says merci.",),
    ),
)

# What lies outside: the subject is named, so that the model learns the shape and not the list.
OUTSIDE = phrases("""
    Who won the game last night? | Who is the president of {x}? |
    What is the weather like today? | What time is it? | What is the price of gold? |
    Who wrote {x}? | When was {x} born? | Who is {x}? | What happened in {y}? |
    How do I install {x}? | Write a program in {x}. | What is the square root of {y}? |
    Translate this into {x}. | What is quantum physics? | What is the news today? |
    How tall is {x}? | What is the population of {x}? | Who is the king of {x}? |
    When did the war in {x} end? | What does {x} mean? | What is {x}? | What is the date today? |
    Where can I buy {x}? | How much does {x} cost? | Who discovered {x}? | Who invented {x}? |
    Solve this equation for {x}. | What is the phone number of {x}? | Explain the theory of {x}. |
    What is the best film of {y}? | Can you write code? | Write a Python function. |
    Explain {x} to me. | What will happen tomorrow? | What is the stock price of {x}? |
    Is {x} a good idea? | Where is {x}? | Do you know {x}? | What is the distance to {x}? |
    Who painted {x}? | Tell me about {x}. | What is the capital of {x}? | How far is {x}? |
    Who was the first person in {x}?
""")
OUTSIDE_THINGS = phrases("""
    Einstein | Shakespeare | Napoleon | Python | Java | Linux | Docker | bitcoin | Google |
    quantum mechanics | Madagascar | Iceland | Vietnam | Hamlet | electricity | chemistry |
    philosophy | democracy | the internet | relativity | the Roman Empire | Mozart | football |
    chess | Mars | Jupiter | a neural network | the stock market | DNA | gravity | blockchain |
    Kubernetes | calculus | astronomy | London Bridge | Obama
""")
