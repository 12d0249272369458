"""Prints a long log; the same one every time."""

import random
import sys


def lines(seed=20240305, count=200_000):
    chance = random.Random(seed)
    fatal = chance.randrange(count)
    for number in range(count):
        level = chance.choices(("INFO", "DEBUG", "WARN", "ERROR"), (70, 20, 8, 2))[0]
        level = "FATAL" if number == fatal else level
        latency = round(chance.expovariate(1 / 40), 2)
        name = f"{chance.getrandbits(32):08x}"
        text = " after ERROR recovery" if chance.random() < 0.01 else ""
        yield f"{level} t={number} id={name} latency={latency}{text}"


if __name__ == "__main__":
    try:
        for line in lines():
            print(line)
    except BrokenPipeError:
        sys.stderr.close()
