# must fail: sealed
set -e
printf '#!/bin/sh\nexit 0\n' > /usr/bin/grep.new
chmod +x /usr/bin/grep.new
mv /usr/bin/grep.new /usr/bin/grep
echo '{"answer": 42}' > answer.json
