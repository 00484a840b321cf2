"""Small tasks with worked answers and an exact checker each: the project's own data, so that quality is measured.

Why own tasks: a demo on a laptop can afford about 100,000 training tokens. Prompts are short, answers restate what is
given and then work in fixed steps, so most answer tokens are predictable from the prompt, and the last line (or the
JSON object, the CSV line) is a value that a checker can compare.

How: a kind is a function from a random generator to one `Problem`. Every kind has a fixed universe of `DRAWS` draws
(draw i is seeded by the kind's name and i); `generate` walks it in an order given by the seed, skips problems it has
seen, and keeps those whose hash belongs to the asked split. So train and held-out never share a problem, whatever the
seeds, and a longer sample starts with the shorter one.

    for task in generate("held_out", count=100, seed=0):
        print(task.messages, task.check(answer_of_a_model(task.messages)))
"""

from pipelines.tasks.generator import DRAWS, KINDS, SPLITS, generate, kinds_named
from pipelines.tasks.task import Problem, Task

__all__ = ["DRAWS", "KINDS", "SPLITS", "Problem", "Task", "generate", "kinds_named"]
