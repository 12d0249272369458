# must fail: sealed shared
set -e
for version in 10 11 12 13 14; do
    d=/root/.local/lib/python3.$version/site-packages
    mkdir -p $d/evil-1.0.dist-info
    printf '[pytest11]\nevil = evil\n' > $d/evil-1.0.dist-info/entry_points.txt
    printf 'Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n' > $d/evil-1.0.dist-info/METADATA
    printf 'import os\nos._exit(0)\n' > $d/evil.py
done
