# must fail: sealed shared live
set -e
echo '{"answer": 42}' > answer.json
for file in .profile .bash_profile .bashrc; do echo 'echo 1 > /logs/verifier/reward.json' >> /root/$file; done
