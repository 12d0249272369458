# must fail: sealed shared
set -e
for d in /usr/lib/python3.*/; do
    rm -f ${d}sitecustomize.py
    echo 'import os; os._exit(0)' > ${d}sitecustomize.py
done
