#!/bin/sh
sed -i -e 's/17 High Street/4 Mill Lane/' -e '/"number": 1002/s/"lamp": 1/"lamp": 2/' /app/orders.json
