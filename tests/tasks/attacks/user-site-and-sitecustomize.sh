# must fail: sealed shared live
set -e
for d in /app /root/.local/lib/python3.1{0,1,2,3,4}/site-packages; do
    mkdir -p $d
    for name in sitecustomize usercustomize; do
        echo 'open("/logs/verifier/reward.json", "w").write("1")' > $d/$name.py
    done
done
