#!/bin/sh
# test.sh - builds libkvd in several ways and tests each. usage: test.sh [SOCKET NAMESPACE] of a real broker.
# KVD_FUZZ is how many rounds the garbage has (2000), KVD_LIES how many lies there are (20000), KVD_SEED where they begin.
set -eu
cd "$(dirname "$0")/.."
socket=${1:-} namespace=${2:-}
said() { printf '== %s\n' "$*"; }

# both FOLDER runs the tests in a folder with the stand-in, and with the real broker.
both() {
    "$1/kvd_test" fake "$1/fake"
    if [ -n "$socket" ]; then "$1/kvd_test" real "$socket" "$namespace"; fi
}

sanitized() {
    flags="-O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all -fsanitize=$1"
    make OUT="build/$1" CC=gcc CFLAGS="$flags" LDFLAGS="-fsanitize=$1" "build/$1/kvd_test" "build/$1/fake"
}

said gcc
make CC=gcc tests build/kvd_test_valgrind build/with_pidfd
both build

said symbols and sizes
{
    build/abi
    nm -D --defined-only build/libkvd.so | awk '$2 == "T" { print "symbol", $3 }' | LC_ALL=C sort
    readelf -d build/libkvd.so | sed -n 's/.*Library soname: \[\(.*\)\].*/soname \1/p'
} >build/abi.txt
diff -u test/abi.txt build/abi.txt

said nothing runs at load or exit, and no state of its own
if nm build/libkvd.a | grep -E ' [BDbd] .*kvd|atexit|pthread_create|pthread_atfork|sigaction| signal$'; then exit 1; fi

if command -v musl-gcc >/dev/null; then
    said musl
    make CC=musl-gcc OUT=build/musl build/musl/libkvd.so build/musl/kvd_test build/musl/fake
    both build/musl
fi

said address and undefined behaviour
# A broker that lies names lengths that malloc refuses.
export ASAN_OPTIONS=allocator_may_return_null=1
sanitized address,undefined
both build/address,undefined

said threads
sanitized thread
both build/thread

said valgrind
grind="valgrind -q --leak-check=full --errors-for-leak-kinds=definite,indirect --error-exitcode=9"
KVD_FUZZ=60 KVD_LIES=5000 build/with_pidfd $grind build/kvd_test_valgrind fake build/fake
if [ -n "$socket" ]; then
    build/with_pidfd $grind build/kvd_test_valgrind real "$socket" "$namespace" one lengths mixed many loop seen
fi

said installed, pkg-config, C++
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
make CC=gcc PREFIX="$root/usr" OUT="$root/build" install >/dev/null
PKG_CONFIG_PATH="$root/usr/lib/pkgconfig"
export PKG_CONFIG_PATH
# shellcheck disable=SC2046 # flags are words
gcc -std=c11 -Wall -Wextra -Werror ../../examples/c/hello.c $(pkg-config --cflags --libs kvd) -o "$root/hello"
LD_LIBRARY_PATH="$root/usr/lib" ldd "$root/hello" | grep -q 'libkvd.so.0 => '
if command -v g++ >/dev/null; then echo '#include <kvd.h>' | g++ -Wall -Wextra -Wpedantic -Werror -fsyntax-only -x c++ -I"$root/usr/include" -; fi
if [ -n "$socket" ]; then
    test "$(LD_LIBRARY_PATH="$root/usr/lib" "$root/hello" "$socket" "$namespace")" = world
fi
if command -v cmake >/dev/null; then
    said CMake
    cmake -S ../../examples/c -B "$root/cmake" -DCMAKE_PREFIX_PATH="$root/usr" >/dev/null
    cmake --build "$root/cmake" >/dev/null
    if [ -n "$socket" ]; then
        test "$("$root/cmake/hello" "$socket" "$namespace")" = world
    fi
fi
echo 'test.sh: PASS'
