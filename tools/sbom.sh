#!/bin/sh
# What an image consists of, as CycloneDX. The Dockerfiles call it; by hand:
#   tools/sbom.sh cargo PACKAGE TARGET          components of a binary: a line each, fields divided by tabs
#   tools/sbom.sh debian FOLDER [PATTERN]       the Debian packages that the files in FOLDER are from, but those of PATTERN
#   tools/sbom.sh document NAME VERSION FILE…   the document of such lines
set -eu
what=$1
shift
case $what in
cargo)
	cargo tree --locked --edges normal --package "$1" --target "$2" --prefix none --format '{p}|{l}' |
		sed 's/ (\*)$//' | LC_ALL=C sort -u | awk -F '|' '{
			split($1, crate, " ")
			version = substr(crate[2], 2)
			licence = $2
			gsub(" */ *", " OR ", licence)
			encoded = version
			gsub(/\+/, "%2B", encoded)
			printf "%s\t%s\tpkg:cargo/%s@%s\t%s\n", crate[1], version, crate[1], encoded, licence
		}'
	;;
debian)
	. /etc/os-release
	find "$1" -type f ! -name "${2:-}" -printf '%f\n' | while read -r file; do
		dpkg-query --search "*/$file" 2>/dev/null | cut -d: -f1
	done | LC_ALL=C sort -u | xargs dpkg-query --show --showformat '${Package} ${Version} ${Architecture}\n' |
		awk -v release="$VERSION_ID" '{
			encoded = $2
			gsub(/\+/, "%2B", encoded)
			printf "%s\t%s\tpkg:deb/debian/%s@%s?arch=%s&distro=debian-%s\t\n", $1, $2, $1, encoded, $3, release
		}'
	;;
document)
	name=$1 version=$2
	shift 2
	cat "$@" | awk -F '\t' -v name="$name" -v version="$version" '
		BEGIN {
			printf "{\"bomFormat\":\"CycloneDX\",\"specVersion\":\"1.6\",\"version\":1,"
			printf "\"metadata\":{\"component\":{\"type\":\"application\",\"name\":\"%s\",\"version\":\"%s\"}},", name, version
			printf "\"components\":["
		}
		{
			printf "%s\n{\"type\":\"library\",\"name\":\"%s\",\"version\":\"%s\",\"purl\":\"%s\"", (NR > 1 ? "," : ""), $1, $2, $3
			if ($4 != "") printf ",\"licenses\":[{\"expression\":\"%s\"}]", $4
			printf "}"
		}
		END { print "\n]}"; if (NR == 0) exit 1 }'
	;;
*)
	echo "cargo, debian or document is meant, not $what" >&2
	exit 2
	;;
esac
