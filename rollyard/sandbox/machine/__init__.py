"""Sandboxes on a machine of the user's own, with nothing installed on it: the scripts of `inside/machine.sh` keep them there, by
this machine's shell or over SSH, and a `MachineProvider` makes a backend of them like any other provider's."""
