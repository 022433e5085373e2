<?php
// What the scripts about sessions share. Each request is a PHP of its own, so that
// several can have a session at a time, as behind a web server.

// visit begins a request: it opens session $id and runs $code. It is ended after 8 s, more than
// the 5 s that it may wait for a lock.
function visit(array $settings, string $id, string $code)
{
    $argv = ['timeout', '8', PHP_BINARY, '-d', 'session.use_cookies=0', '-d', 'session.cache_limiter=', '-d', 'display_errors=stderr'];
    foreach ($settings as $k => $v) {
        array_push($argv, '-d', "$k=$v");
    }
    array_push($argv, '-r', "session_id('$id'); if (!session_start()) exit(1); $code");
    $p = proc_open($argv, [1 => ['pipe', 'w'], 2 => ['pipe', 'w']], $pipes);
    return [$p, $pipes];
}

// answer is what a request wrote; an error if PHP complains.
function answer(array $visit): string
{
    [$p, $pipes] = $visit;
    $out = stream_get_contents($pipes[1]);
    $err = stream_get_contents($pipes[2]);
    if (proc_close($p) != 0 || $err != '') {
        throw new Exception("request failed: $out $err");
    }
    return $out;
}

function check_sessions(array $settings, string $name): void
{
    $count = '$_SESSION["n"] = ($_SESSION["n"] ?? 0) + 1; echo $_SESSION["n"];';
    $id = fn() => bin2hex(random_bytes(16));

    check("$name, counting", function () use ($settings, $count, $id) {
        [$a, $b] = [$id(), $id()];
        foreach (['1', '2', '3'] as $want) {
            equal(answer(visit($settings, $a, $count)), $want);
        }
        equal(answer(visit($settings, $b, $count)), '1');
    });

    check("$name, values", function () use ($settings, $id) {
        $a = $id();
        answer(visit($settings, $a, '$_SESSION = ["list" => [1, 2, "é"], "large" => str_repeat("x", 100000)];'));
        equal(answer(visit($settings, $a, 'echo json_encode($_SESSION["list"]), strlen($_SESSION["large"]);')), '[1,2,"\u00e9"]100000');
    });

    check("$name, destroy", function () use ($settings, $count, $id) {
        $a = $id();
        answer(visit($settings, $a, $count));
        answer(visit($settings, $a, 'session_destroy();'));
        equal(answer(visit($settings, $a, $count)), '1');
    });

    check("$name, regenerate", function () use ($settings, $count, $id) {
        $a = $id();
        answer(visit($settings, $a, $count));
        $new = answer(visit($settings, $a, 'session_regenerate_id(true); echo session_id();'));
        equal(answer(visit($settings, $new, $count)), '2');
        equal(answer(visit($settings, $a, $count)), '1');
    });

    check("$name, no lock is left behind", function () use ($settings, $count, $id) {
        $a = $id();
        $begin = microtime(true);
        for ($i = 1; $i <= 3; $i++) {
            equal(answer(visit($settings, $a, $count)), "$i");
        }
        if (microtime(true) - $begin > 5) {
            throw new Exception('three requests took ' . round(microtime(true) - $begin, 1) . ' s');
        }
    });

    check("$name, concurrent requests lose nothing", function () use ($settings, $id) {
        $a = $id();
        $visits = [];
        for ($i = 0; $i < 6; $i++) {
            $visits[] = visit($settings, $a, '$n = $_SESSION["n"] ?? 0; usleep(30000); $_SESSION["n"] = $n + 1;');
        }
        array_map('answer', $visits);
        equal(answer(visit($settings, $a, 'echo $_SESSION["n"];')), '6');
    });
}
