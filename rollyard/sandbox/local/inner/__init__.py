"""What runs on the other side of the control socket: the zygote, the supervisor of one sandbox, the keeper of one program.

Everything here is the standard library and ctypes alone. The zygote imports it once with an empty environment and no
site-packages; a sandbox's root has no Python of ours, so nothing here may be imported late.
"""
