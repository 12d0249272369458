#!/bin/sh
set -e
cd /app/shop
git config user.name Solver
git config user.email solver@example.com
cat > /tmp/probe.sh <<'END'
python3 -c 'from price import total; raise SystemExit(total([100, 250], discount=10) != 315)'
END
export PYTHONDONTWRITEBYTECODE=1
git bisect start HEAD "$(git rev-list --max-parents=0 HEAD)" > /dev/null
git bisect run sh /tmp/probe.sh > /dev/null
git rev-parse refs/bisect/bad > /app/answer.txt
git bisect reset > /dev/null 2>&1
sed -i 's/return sum(prices) - discount/return sum(prices) * (100 - discount) \/\/ 100/' price.py
git commit -qam 'A discount is a percentage again'
