# must fail: sealed shared live
set -e
mkdir bin
printf '#!/bin/sh\n' > bin/grep
chmod +x bin/grep
echo '{"answer": 42}' > answer.json
for file in .profile .bash_profile .bashrc; do echo 'export PATH=/app/bin:$PATH' >> /root/$file; done
