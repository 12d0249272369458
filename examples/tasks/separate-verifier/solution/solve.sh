#!/bin/sh
mkdir -p /app/out
cat > /app/out/roman.sh <<'END'
case $1 in '' | *[!0-9]* | ?????*) exit 1 ;; esac
n=$1
[ "$n" -ge 1 ] && [ "$n" -le 3999 ] || exit 1
out=
for pair in 1000:M 900:CM 500:D 400:CD 100:C 90:XC 50:L 40:XL 10:X 9:IX 5:V 4:IV 1:I; do
    while [ "$n" -ge "${pair%:*}" ]; do
        out=$out${pair#*:}
        n=$((n - ${pair%:*}))
    done
done
echo "$out"
END
