"""A dataset for verl and SkyRL out of a file of tasks: `python dataset.py tasks.jsonl train.parquet`.

A row has the instruction as its prompt, which both trainers want to see, and the whole task as JSON in `task`, which rollouts
are made of.
"""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def dataset_rows(lines):
    for line in lines:
        task = json.loads(line)
        yield {
            "data_source": "rollyard",
            "prompt": [{"role": "user", "content": task["instruction"]}],
            "env_class": "rollyard",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "task": json.dumps(task),
        }


if __name__ == "__main__":
    source, target = sys.argv[1:]
    rows = list(dataset_rows(line for line in Path(source).read_text().splitlines() if line.strip()))
    pq.write_table(pa.Table.from_pylist(rows), target)
    print(f"{len(rows)} rows in {target}")
