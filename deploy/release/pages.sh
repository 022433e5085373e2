#!/usr/bin/env bash
# pages.sh FOLDER: man pages, and completions of shells, of kvd and kvctl. They come from the commands as the
# programs build them: the files of pages/ are compiled into each program, and run in place of it. So no
# program that is installed carries what writes them, and the store's module does not depend on it.
set -euo pipefail
out=$(realpath "$1")
cd "$(dirname "$0")"
tree=$(realpath ../..)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:?seconds since 1970}
tags=$(sed -n 's/^TAGS = //p' "$tree/Makefile")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The store's module, and what cobra's generator of man pages depends on besides, at the versions of this one.
cp "$tree/go.mod" "$work/go.mod"
sort -u "$tree/go.sum" go.sum >"$work/go.sum"
for module in github.com/cpuguy83/go-md2man/v2 github.com/russross/blackfriday/v2; do
	go mod edit -require "$module@$(go list -m -f '{{.Version}}' "$module")" "$work/go.mod"
done
for program in kvd kvctl; do
	if [ -e "$tree/cmd/$program/manual.go" ] || [ -e "$tree/cmd/$program/manual_of.go" ]; then
		echo "cmd/$program has files of these names" >&2
		exit 1
	fi
	cat >"$work/overlay.json" <<EOF
{"Replace": {
	"$tree/cmd/$program/manual.go": "$PWD/pages/pages.go",
	"$tree/cmd/$program/manual_of.go": "$PWD/pages/$program.go"
}}
EOF
	CGO_ENABLED=0 go -C "$tree" build -modfile "$work/go.mod" -mod=mod -buildvcs=false -tags "${tags:?of the Makefile},pages" -overlay "$work/overlay.json" -o "$work/$program" "./cmd/$program"
	# No variable of the environment may show in a default.
	env -i SOURCE_DATE_EPOCH="$SOURCE_DATE_EPOCH" "$work/$program" "$out"
done
