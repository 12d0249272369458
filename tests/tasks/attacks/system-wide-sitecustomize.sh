# must fail: sealed shared live
set -e
for d in /usr/lib/python3.*/; do
    rm -f ${d}sitecustomize.py
    echo 'open("/logs/verifier/reward.json", "w").write("1")' > ${d}sitecustomize.py
done
