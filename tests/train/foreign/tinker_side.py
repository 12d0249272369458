"""Runs in an environment with tinker: its `Datum` takes our fields and turns each into the tensor its losses read."""

import json
import sys
from pathlib import Path

import tinker

made = []
for fields in json.loads(Path(sys.argv[1], "tinker.json").read_text()):
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(fields["model_input"]), loss_fn_inputs=fields["loss_fn_inputs"]
    )
    tensors = {name: (tensor.dtype, tensor.to_numpy().tolist()) for name, tensor in datum.loss_fn_inputs.items()}
    made.append({"mask": fields["mask"], "input": datum.model_input.to_ints(), **tensors})
print(json.dumps(made))
