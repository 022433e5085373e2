<?php
// What the scripts share: run checks in turn and say on stdout how each went, one
// line each, `ok NAME` or `fail NAME: why`, and `done` at the end.
[, $redis, $memcached, $db] = $argv;
ini_set('display_errors', 'stderr');

function version(string $text): void
{
    echo "version $text\n";
}

function check(string $name, callable $f): void
{
    // A warning is a failure, too.
    set_error_handler(function ($no, $text, $file, $line) { throw new ErrorException($text, 0, $no, $file, $line); });
    try {
        $f();
        echo "ok $name\n";
    } catch (Throwable $e) {
        $why = get_class($e) . ' ' . $e->getMessage() . ' in line ' . $e->getLine();
        echo "fail $name: " . str_replace("\n", ' ', $why) . "\n";
    }
    restore_error_handler();
}

function equal(mixed $got, mixed $want): void
{
    if ($got !== $want) {
        throw new Exception('got ' . substr(var_export($got, true), 0, 200) . ', want ' . substr(var_export($want, true), 0, 200));
    }
}
