#!/bin/sh
# Checks the alert rules, and what they say yes and no to, with promtool: the one on the PATH, or Debian's or Ubuntu's,
# unpacked into target/ and not installed, since the package would start a server.
set -eu
cd "$(dirname "$0")/../.."
work=target/alerts
mkdir -p "$work"
promtool=$(command -v promtool || true)
if [ -z "$promtool" ]; then
	promtool=$PWD/$work/usr/bin/promtool
	if [ ! -x "$promtool" ]; then
		echo "fetching promtool"
		(
			cd "$work"
			apt-get download -q prometheus >/dev/null 2>&1 || { apt-get update -q >/dev/null && apt-get download -q prometheus >/dev/null; }
			dpkg-deb -x prometheus_*.deb .
			rm -f prometheus_*.deb
		)
	fi
fi
# The rules are the object's spec. Words for people are left out: the tests are about when, not about words.
"$promtool" check rules /dev/stdin <<RULES
$(sed -n '/^spec:/,$p' manifests/chart/files/monitoring/alerts.yaml | sed '1d; s/^  //')
RULES
sed -n '/^spec:/,$p' manifests/chart/files/monitoring/alerts.yaml |
	sed '1d; s/^  //; /^ *annotations:$/d; /^ *summary: /d; /^ *description: /d' >"$work/rules.yaml"
cp manifests/monitoring/alerts-test.yaml "$work/"
"$promtool" test rules "$work/alerts-test.yaml"
