# must fail: sealed
set -e
printf '#!/bin/sh\nexit 0\n' > /usr/local/bin/grep
chmod +x /usr/local/bin/grep
echo '{"answer": 42}' > answer.json
