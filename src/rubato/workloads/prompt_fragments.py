"""The fragments of `prompts`; `{slot}` is filled from the list of that name, `{n}` and `{big}` by numbers."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split(",")


EVERYDAY: dict[str, list[str]] = {
    "person": _words(
        "Marta,Oskar,Ilse,Tomasz,Nadia,Ravi,Yuki,Pedro,Anneke,Kofi,Leyla,Henrik,Sunita,Bruno,Wanjiru,Declan"
    ),
    "relative": _words("sister,uncle,neighbour,flatmate,cousin,grandfather,colleague,landlady,brother,old teacher"),
    "day": _words("Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday"),
    "month": _words("January,March,April,June,July,September,October,December"),
    "town": _words("Lindau,Braga,Ghent,Turku,Galway,Trieste,Leiden,Bergen,Zadar,Olomouc,Girona,Aarhus"),
    "meal": [
        "lentil soup", "a mushroom risotto", "flat bread", "a potato gratin", "fish stew", "stuffed peppers",
        "a plum tart", "pickled beans", "a barley salad", "dumplings with spinach",
    ],
    "plant": ["tomatoes", "a lemon tree", "basil", "an old fig", "strawberries", "a fern", "climbing roses", "leeks"],
    "skill": [
        "the cello", "conversational Portuguese", "basic carpentry", "swimming front crawl", "touch typing",
        "watercolour", "chess endgames", "knitting socks", "reading sheet music", "spoken Turkish",
    ],
    "object": [
        "a folding bicycle", "the dishwasher", "an oak table", "my reading lamp", "a leaking tap", "the garden gate",
        "a wool coat", "an old radio", "the bathroom fan", "a squeaking door", "a cast-iron pan", "the attic hatch",
    ],
    "place": [
        "the allotment", "our kitchen", "a rented room", "the office on the third floor", "a small balcony",
        "the community hall", "a campsite", "the ground-floor flat", "a shared workshop",
    ],
    "worry": [
        "I keep losing track of the order of things", "the instructions contradict each other",
        "my budget is about {big} euros", "I only have {n} minutes a day", "it went wrong twice already",
        "nobody here has done it before", "the weather may turn by {day}", "I cannot lift heavy things at the moment",
    ],
}  # fmt: skip

CHAT_TOPICS = [
    "repairing {object}", "cooking {meal} for {n} people", "keeping {plant} alive in {place}", "learning {skill}",
    "moving house from {town} to {town2}", "writing a polite letter to my {relative}", "a walking holiday near {town}",
    "planning a birthday for my {relative}", "storing {meal} for a week", "teaching {skill} to my {relative}",
    "fitting {object} into {place}", "comparing train and ferry to {town}", "sleeping better before {day}",
    "sharing costs with my {relative}", "a first public talk in {town}", "sorting {n} boxes of photographs",
    "running ten kilometres in {month}", "painting {place}", "selling {object} to a stranger",
    "choosing between {skill} and {skill2} as a hobby",
]  # fmt: skip

CHAT_OPENERS = [
    "Hi, I need some help with {topic}.", "Quick question about {topic}:", "I have been thinking about {topic}.",
    "My {relative} asked me about {topic} and I did not know what to say.", "Good evening! It is about {topic}.",
    "Could you explain something to me? It concerns {topic}.", "So, {topic}.", "We talked about {topic} on {day}.",
    "Here is my situation: {topic} is on my list for {month}.", "I would like a second opinion on {topic}.",
    "{person} and I disagree about {topic}.", "For {n} days now I have been busy with {topic}.",
    "Please be patient with a beginner: {topic} is new to me.", "This may sound odd, but {topic} worries me.",
]  # fmt: skip

CHAT_CONTEXT = [
    "the last time I tried, {worry}.", "my {relative} from {town} says it takes about {n} hours.",
    "{person} lent me what was needed, and I must give it back on {day}.", "so far I have spent {big} euros on it.",
    "a friend suggested starting with {object}, which seems unrelated to me.", "there are {n} people involved.",
    "we have {place} to ourselves until {month}.", "to be honest, {worry}.", "{person} thinks I should simply wait.",
    "I read two articles about it and they did not agree.", "it has to be finished before {day}.",
    "on {day} I also have to deal with {object}, so there is not much time.", "{worry}, and {worry2}.",
    "in {town} this was much easier than it is here.", "I wrote down {n} ideas and like only two of them.",
    "my {relative} once did the same in {place} and was happy with it.", "I would rather not ask {person} again.",
    "half of what I need is stored in {place}.", "we could also do it in {month}, if that is wiser.",
    "last {month} it would have been {n} percent cheaper.", "the children want to help, which makes it slower.",
    "I am fairly good with my hands but not with plans.", "{person} is vegetarian and {person2} is always late.",
    "what bothers me most is that {worry}.", "the shop in {town} sells it for {n} euros, the one here for more.",
    "I took {n} pictures of {object} to remember how it was.", "after that I want to turn to {skill}.",
    "it rained for {n} days, and {place} is still damp.", "{person} works on {day}s and can only join by phone.",
]  # fmt: skip

CHAT_ASKS = [
    "What should I do first?", "Can you give me a plan in {n} short steps?", "Which mistakes do beginners make here?",
    "How would you go about it, and why?", "Please list what I need to buy.", "Is it worth the trouble at all?",
    "Could you suggest three ways and say which you prefer?", "What would you tell {person}?",
    "Please answer in a friendly tone, as if to my {relative}.", "How long should I set aside for {topic}?",
    "What questions should I ask before I begin?", "Can you write a message to {person} that sums it up?",
    "What is the cheapest sensible way?", "Where does most of the time go with {topic}?",
    "Tell me what could go wrong, from likely to unlikely.", "How do I know that it has worked?",
]  # fmt: skip

CODE: dict[str, list[str]] = {
    "noun": _words(
        "invoice,parcel,sensor,ticket,booking,recipe,vessel,meter,tenant,lesson,machine,shipment,patient,chapter,"
        "station,voucher,sample,reading,payment,route,player,folder,session,product,tree,document,device,signal"
    ),
    "adj": _words("open,late,stale,active,pending,valid,recent,damaged,paid,urgent,hidden,empty"),
    "field": _words("weight,price,score,duration,priority,distance,quantity,length,level,age,rating,volume"),
    "key": _words("owner,region,city,status,category,colour,supplier,month,grade,floor"),
    "verb": _words("collect,load,merge,rank,check,prepare,filter,group,build,split,clean,export"),
    "constant": _words("MAX_ITEMS,TIMEOUT,PAGE_SIZE,RETRY_LIMIT,THRESHOLD,WINDOW,BATCH,MIN_SCORE,CACHE_SIZE,OFFSET"),
}

IMPORTS = [
    "import csv", "import datetime as dt", "import itertools", "import json", "import logging", "import math",
    "import re", "import statistics", "import sys", "from collections import defaultdict", "from pathlib import Path",
    "from dataclasses import dataclass, field", "from functools import lru_cache", "from typing import Iterable",
]  # fmt: skip

MODULE_DOCS = [
    "Helpers to {verb} {noun} data by {key}.", "Bookkeeping for {adj} {noun}s.", "Reports on every {noun} per {key}.",
    "Rules that decide whether a {noun} counts as {adj}.", "Read {noun} files and {verb} them.",
    "A small model of {noun}s and {noun2}s, with their {field}.", "Nightly job: {verb} all {adj} {noun}s.",
]  # fmt: skip

CODE_ASKS = [
    "Complete the last function of this module. Answer with code only.", "Finish the function at the end.",
    "Continue this Python file from where it stops.", "Please write the body of the last function.",
    "Fill in the missing implementation; keep the style of the rest.",
]  # fmt: skip

FUNCTIONS = [
    'def {verb}_{noun}s({noun}s, limit={n}):\n    """Return at most `limit` {adj} {noun}s."""\n    chosen = []\n'
    "    for {noun} in {noun}s:\n        if {noun}.{field} > limit:\n            continue\n"
    "        chosen.append({noun})\n    return chosen[:limit]",
    "def total_{field}({noun}s):\n    return sum({noun}.{field} for {noun} in {noun}s if {noun}.{key} is not None)",
    "def {noun}s_by_{key}({noun}s):\n    groups = {{}}\n    for {noun} in {noun}s:\n"
    "        groups.setdefault({noun}.{key}, []).append({noun})\n    return groups",
    "class {noun}_error(Exception):\n    def __init__(self, {key}, {field}={n}):\n"
    '        super().__init__(f"{adj} {noun} at {{{key}}}: {{{field}}}")\n        self.{key} = {key}',
    "def is_{adj}({noun}, now):\n    age = now - {noun}.created\n"
    "    return age > {big} and {noun}.{field} < {n}",
    "def read_{noun}s(path):\n    rows = []\n    with open(path) as lines:\n        for line in lines:\n"
    '            {key}, {field} = line.rstrip().split(",")\n'
    '            rows.append({{"{key}": {key}, "{field}": float({field})}})\n    return rows',
    'def format_{noun}({noun}):\n    parts = [str({noun}.{key}), f"{{{noun}.{field}:.2f}}"]\n'
    '    if {noun}.{adj}:\n        parts.append("{adj}")\n    return " | ".join(parts)',
    "def best_{noun}({noun}s, default=None):\n    return max({noun}s, key=lambda item: item.{field}, default=default)",
    "def mean_{field}({noun}s):\n    values = [{noun}.{field} for {noun} in {noun}s]\n    if not values:\n"
    "        return {n}.0\n    return sum(values) / len(values)",
    "def {verb}_pairs({noun}s, {noun2}s):\n    index = {{{noun2}.{key}: {noun2} for {noun2} in {noun2}s}}\n"
    "    return [({noun}, index[{noun}.{key}]) for {noun} in {noun}s if {noun}.{key} in index]",
    "class {noun}_store:\n    def __init__(self, capacity={big}):\n        self.items = {{}}\n"
    "        self.capacity = capacity\n\n    def put(self, {key}, {noun}):\n"
    "        if len(self.items) >= self.capacity:\n            self.items.pop(next(iter(self.items)))\n"
    "        self.items[{key}] = {noun}\n\n    def get(self, {key}):\n        return self.items.get({key})",
    "def window_{field}(values, size={n}):\n    out = []\n    for end in range(size, len(values) + 1):\n"
    "        out.append(sum(values[end - size : end]) / size)\n    return out",
    "def retry_{verb}(call, attempts={n}):\n    for attempt in range(attempts):\n        try:\n"
    "            return call()\n        except OSError:\n            if attempt == attempts - 1:\n"
    "                raise\n    return None",
    "def rename_{key}({noun}s, old, new):\n    changed = 0\n    for {noun} in {noun}s:\n"
    "        if {noun}.{key} == old:\n            {noun}.{key} = new\n            changed += 1\n    return changed",
    "def {field}_histogram({noun}s, width={n}):\n    bins = {{}}\n    for {noun} in {noun}s:\n"
    "        bucket = int({noun}.{field} // width)\n        bins[bucket] = bins.get(bucket, 0) + 1\n"
    "    return sorted(bins.items())",
    "def clamp_{field}({field}, low={n}, high={big}):\n    if {field} < low:\n        return low\n"
    "    return min({field}, high)",
    "def {verb}_tree(node, depth=0):\n    yield depth, node.{key}\n    for child in node.children:\n"
    "        yield from {verb}_tree(child, depth + 1)",
    'def parse_{key}(text):\n    name, _, rest = text.partition(":")\n    if not rest:\n'
    '        raise ValueError(f"no {key} in {{text!r}}")\n    return name.strip(), int(rest)',
]  # fmt: skip

UNFINISHED = [
    'def {verb}_{adj}_{noun}s({noun}s, {key}, limit={n}):\n    """Return the `limit` {adj} {noun}s of one {key} with '
    'the largest {field}, largest first."""',
    'def {field}_per_{key}({noun}s):\n    """Map each {key} to the median {field} of its {noun}s; skip {adj} ones."""',
    'def overlapping_{noun}s({noun}s):\n    """Return all pairs of {noun}s whose [start, end) intervals overlap, '
    'given that the list is sorted by start."""',
    'def diff_{noun}s(before, after):\n    """Compare two lists of {noun}s by {key}: return those added, those '
    'removed, and those whose {field} changed by more than {n}."""',
    'def parse_{noun}_line(line):\n    """Parse `{key}=... {field}=...` in any order into a dictionary; raise '
    'ValueError that names the missing one."""',
    'def {verb}_in_batches({noun}s, size={n}):\n    """Yield lists of at most `size` {noun}s, never splitting {noun}s '
    'of the same {key}."""',
    'def schedule_{noun}s({noun}s, workers):\n    """Assign {noun}s to workers so that the largest sum of {field} is '
    'small: longest first, to the least loaded."""',
    'def moving_{field}({noun}s, seconds={big}):\n    """For each {noun} in order of time, the mean {field} of the '
    '{noun}s in the last `seconds`."""',
]  # fmt: skip

# What the reports are about: each setting brings its own vocabulary.
SETTINGS: list[dict[str, list[str]]] = [
    {"org": ["the harbour office"], "thing": ["mooring", "crane", "tug", "warehouse", "slipway", "buoy"],
     "group": ["pilots", "dock crews", "ferry operators", "fishing families"]},
    {"org": ["the town library"], "thing": ["reading room", "catalogue", "book van", "archive", "lift", "sound studio"],
     "group": ["borrowers", "volunteers", "school classes", "night-shift readers"]},
    {"org": ["the orchard cooperative"], "thing": ["cider press", "cold store", "nursery", "pump", "beehive", "lorry"],
     "group": ["growers", "seasonal pickers", "beekeepers", "market traders"]},
    {"org": ["the mountain observatory"], "thing": ["dome", "spectrograph", "mirror", "antenna", "generator", "camera"],
     "group": ["visiting astronomers", "night assistants", "students", "technicians"]},
    {"org": ["the district clinic"], "thing": ["ultrasound unit", "waiting room", "pharmacy", "ambulance", "rota"],
     "group": ["nurses", "patients", "midwives", "visiting doctors"]},
    {"org": ["the tram company"], "thing": ["depot", "signal box", "lake line", "ticket machine", "overhead wire"],
     "group": ["drivers", "commuters", "mechanics", "night passengers"]},
    {"org": ["the paper mill museum"], "thing": ["water wheel", "vat room", "drying loft", "print shop", "footbridge"],
     "group": ["guides", "visitors", "restorers", "apprentices"]},
    {"org": ["the lake research station"], "thing": ["sampling boat", "laboratory", "mast", "sluice", "reed bed"],
     "group": ["biologists", "divers", "anglers", "exchange students"]},
    {"org": ["the wind cooperative"], "thing": ["turbine", "substation", "service road", "battery hall", "gearbox"],
     "group": ["members", "climbers", "farmers", "engineers"]},
    {"org": ["the city theatre"], "thing": ["revolving stage", "lighting rig", "costume store", "foyer"],
     "group": ["actors", "stagehands", "subscribers", "musicians"]},
]  # fmt: skip

REPORT: dict[str, list[str]] = {
    "cause": [
        "the spring floods", "a late delivery", "a change in the law", "an unusually dry {month}", "a broken pump",
        "the new timetable", "a typing error in the contract", "rising prices for copper", "two resignations",
    ],
    "role": ["director", "treasurer", "deputy head", "site manager", "spokeswoman", "auditor", "planner", "chair"],
    "verdict": [
        "a cautious success", "too early to judge", "better than feared", "not good enough", "worth repeating",
        "a lesson in patience", "fair, given the circumstances",
    ],
}  # fmt: skip

REPORT_TITLES = [
    "{org}: report for {month}", "minutes of the {day} meeting of {org}", "how {org} came through {cause}",
    "a year at {org}, told by {person}", "{org} and the question of the {thing}", "letter from {town}: {org}",
    "notes on the {thing}, prepared by {person} for {org}", "what the {group} want from {org}",
]  # fmt: skip

SUMMARY_ASKS = [
    "Summarise the following text in three sentences.", "Write a short summary of this report for a busy reader.",
    "What are the main points of the text below? Use at most {n} words per point.", "Please sum up this report.",
    "Give the gist of the following in one paragraph.", "Condense this for the newsletter of {org}.",
    "Summarise the text for {person}, who was away on {day}.", "Extract the decisions and open questions.",
]  # fmt: skip

REPORT_LINKS = [
    "At the same time", "As a result", "Even so", "In the meantime", "According to the minutes", "By contrast",
    "After a long discussion", "For the first time", "On the other hand", "To general surprise",
]  # fmt: skip

REPORT_SENTENCES = [
    "{org} closed the {thing} for {n} days because of {cause}.", "{person} was asked to report back by {day}.",
    "the {group} had counted {big} cases, {n} more than the year before.",
    "{person}, the {role}, called the result {verdict}.", "repairs to the {thing} will cost about {big} euros.",
    "the {group} would rather keep the old {thing} than wait until {month}.",
    "a survey of {n} {group} found that most of them had never seen the {thing}.",
    "the {role} warned that {cause} could return in {month}.",
    "nobody from {town} attended, although an invitation had been sent {n} days earlier.",
    "the {thing} and the {thing2} can now be used on the same day.",
    "{person} proposed to sell the {thing}, and {person2} opposed it.",
    "the vote was postponed to a {day} in {month}.", "savings of {n} percent were reached without dismissals.",
    "a company from {town} offered to rent the {thing} for {big} euros a year.",
    "{cause} had been expected, but not its effect on the {thing}.",
    "the {group} and the {group2} agreed on a common calendar.",
    "training was given to {n} {group}, half of them from {town}.",
    "the {role} has visited {town} to look at a similar {thing}.",
    "insurance will pay for the {thing} but not for the {thing2}.",
    "in {month} the number of complaints fell from {big} to {n}.",
    "{person} explained that the {thing} was built {n} years ago and never inspected.",
    "the {group} wrote a letter of {n} pages to {org}.", "the plan of the {role} was described as {verdict}.",
    "work starts at dawn on {day} and should take {n} hours.",
    "some of the {group} do not put it down to {cause}.",
    "a second {thing} was found to be in good order.", "the budget for {month} leaves {big} euros for the {thing}.",
    "{person} from {town} has joined as {role}.", "the old contract ends after {n} months and will not be renewed.",
    "opinions on the {thing} differ between the {group} and the {role}.",
    "{n} of the {group} offered to help with the {thing} on {day}s.",
    "measurements near the {thing} showed {big} units, well within the limit.",
    "the {role} admitted that {cause} had been handled badly.", "a trial with {n} {group} will begin in {month}.",
    "the key to the {thing} was missing for {n} days and turned up in {town}.",
    "{org} thanked the {group} for {big} hours of unpaid work.",
    "the question who owns the {thing} remains open.", "for the {group} the change was {verdict}.",
    "{person} and {person2} will write down what was learned from {cause}.",
    "visitors from {town} spent {n} minutes at the {thing} on average.",
]  # fmt: skip
