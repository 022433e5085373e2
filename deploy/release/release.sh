#!/usr/bin/env bash
# release.sh VERSION FOLDER: the release VERSION (v0.1.0) in FOLDER, which it empties: archives, packages for
# Debian and RPM, wheels for Python, lists of what all consists of (CycloneDX), checksums. The same tree and
# SOURCE_DATE_EPOCH (default: the time of the commit) give the same bytes, wherever they lie; those of libkvd are of the C
# compiler, too, and want no older glibc than they say. ARCHES (amd64 arm64) says for what.
set -euo pipefail
version=${1:?VERSION, as v0.1.0} out=${2:?FOLDER}
if ! [[ $version =~ ^v[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.]+)?$ ]]; then
	echo "VERSION=$version: want vMAJOR.MINOR.PATCH or vMAJOR.MINOR.PATCH-PRE" >&2
	exit 2
fi
# As Python writes it (PEP 440); a wheel of another name could not be installed.
python=$(sed -E 's/^v//; s/-(a|b|rc)[a-z]*\.?([0-9]+)$/\1\2/' <<<"$version")
if ! [[ $python =~ ^[0-9.]+((a|b|rc)[0-9]+)?$ ]]; then
	echo "VERSION=$version: want a PRE of alpha, beta or rc and a number, such as rc1" >&2
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
	case $arch in amd64) triplet=x86_64-linux-gnu ;; arm64) triplet=aarch64-linux-gnu ;; *)
		echo "ARCHES: $arch: want amd64 or arm64" >&2
		exit 2
		;;
	esac
	for tool in "$triplet-gcc" "$triplet-ar"; do
		command -v "$tool" >/dev/null || { echo "$tool is not installed: on Debian, apt-get install gcc-${triplet/_/-}" >&2 && exit 1; }
	done
	lib=$work/linux_$arch/deb
	make --no-print-directory -s -C client/c all CC="$triplet-gcc" AR="$triplet-ar" CFLAGS=-O2 LDFLAGS=-s OUT="$lib" PREFIX=/usr LIBDIR="/usr/lib/$triplet"
	cp -r "$lib" "$work/linux_$arch/rpm"
	sed -i "s,^libdir=.*,libdir=/usr/lib64," "$work/linux_$arch/rpm/kvd.pc"
	/usr/bin/python3 client/python/wheel.py --library "$lib/libkvd.so" --version "$python" --out "$out" >/dev/null
	for program in kvd kvctl; do
		go run "$bom" bin -json -noserial -notimestamp -std -version "$version" -output "$out/$program-${version#v}-linux-$arch.cdx.json" "$work/linux_$arch/$program"
	done
done
mkdir "$work/pages"
deploy/release/pages.sh "$work/pages"
go -C deploy/release run . -version "$version" -tree "$tree" -work "$work" -out "$out" -arches "$ARCHES" -time "$SOURCE_DATE_EPOCH"
