#!/usr/bin/env bash
# release.sh VERSION FOLDER: the release VERSION (v0.1.0) in FOLDER, which it empties: archives, packages for
# Debian and RPM, lists of what the programs consist of (CycloneDX), checksums. The same tree and
# SOURCE_DATE_EPOCH (default: the time of the commit) give the same bytes, wherever they lie. ARCHES (amd64 arm64) says for what.
set -euo pipefail
version=${1:?VERSION, as v0.1.0} out=${2:?FOLDER}
if ! [[ $version =~ ^v[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.]+)?$ ]]; then
	echo "VERSION=$version: want vMAJOR.MINOR.PATCH or vMAJOR.MINOR.PATCH-PRE" >&2
	exit 2
fi
mkdir -p "$out"
out=$(realpath "$out")
tree=$(realpath "$(dirname "$0")/../..")
cd "$tree"
export ARCHES=${ARCHES:-amd64 arm64} SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
bom=github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.10.0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "${out:?}"/*

make --no-print-directory release-programs VERSION="$version" RELEASE="$work"
for arch in $ARCHES; do
	for program in kvd kvctl; do
		go run "$bom" bin -json -noserial -notimestamp -std -version "$version" -output "$out/$program-${version#v}-linux-$arch.cdx.json" "$work/linux_$arch/$program"
	done
done
mkdir "$work/pages"
deploy/release/pages.sh "$work/pages"
go -C deploy/release run . -version "$version" -tree "$tree" -work "$work" -out "$out" -arches "$ARCHES" -time "$SOURCE_DATE_EPOCH"
