# must fail: sealed shared
set -e
printf 'import os\nos._exit(0)\n' > work.py
