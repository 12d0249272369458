#!/bin/sh
sed -i -e 's/^port = 8080/port = 8443/' -e 's/^tls = off/tls = on/' /app/server.ini
