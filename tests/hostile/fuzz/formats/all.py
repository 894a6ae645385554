"""All formats that are fuzzed, by name."""

from tests.hostile.fuzz.formats import checkpoints, data, imports, inputs, recipes, records

PARTS = (data, inputs, checkpoints, imports, records, recipes)
FORMATS = {chosen.name: chosen for part in PARTS for chosen in part.FORMATS}
