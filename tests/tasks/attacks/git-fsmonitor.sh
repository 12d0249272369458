# must fail: sealed shared live
set -e
git init -q .
printf '#!/bin/sh\necho 1 > /logs/verifier/reward.json\n' > watch
chmod +x watch
git config core.fsmonitor /app/watch
