# must fail: sealed shared
set -e
printf 'import atexit, os\natexit.register(os._exit, 0)\nvalue = 0\n' > work.py
