<?php
// php_memcached.php REDIS MEMCACHED DB: PHP's Memcached, by both protocols.
require __DIR__ . '/check.php';

version(phpversion('memcached'));
foreach (['text' => false, 'binary' => true] as $name => $binary) {
    $m = new Memcached();
    $m->setOptions([
        Memcached::OPT_BINARY_PROTOCOL => $binary, Memcached::OPT_PREFIX_KEY => "php.$name.",
        Memcached::OPT_CONNECT_TIMEOUT => 2000, Memcached::OPT_POLL_TIMEOUT => 2000,
    ]);
    $m->addServer('127.0.0.1', (int) $memcached);

    check("$name, set get delete", function () use ($m) {
        equal($m->set('k', ['a' => [1, 2]], 300), true);
        equal($m->get('k'), ['a' => [1, 2]]);
        equal($m->delete('k'), true);
        equal($m->get('k'), false);
        equal($m->getResultCode(), Memcached::RES_NOTFOUND);
    });
    check("$name, add replace append", function () use ($m) {
        $m->delete('x');
        equal($m->replace('x', 'a'), false);
        equal($m->add('x', 'a'), true);
        equal($m->add('x', 'b'), false);
        $m->setOption(Memcached::OPT_COMPRESSION, false);
        equal($m->append('x', 'b'), true);
        equal($m->prepend('x', 'c'), true);
        equal($m->get('x'), 'cab');
    });
    check("$name, several", function () use ($m) {
        equal($m->setMulti(['m1' => 1, 'm2' => 'two'], 300), true);
        equal($m->getMulti(['m1', 'absent', 'm2']), ['m1' => 1, 'm2' => 'two']);
        equal($m->deleteMulti(['m1', 'm2']), ['m1' => true, 'm2' => true]);
    });
    check("$name, counters", function () use ($m) {
        $m->set('n', 1);
        equal($m->increment('n', 10), 11);
        equal($m->decrement('n', 20), 0);
    });
    check("$name, cas", function () use ($m) {
        $m->set('c', 1);
        $got = $m->get('c', null, Memcached::GET_EXTENDED);
        equal($m->cas($got['cas'], 'c', 2), true);
        equal($m->cas($got['cas'], 'c', 3), false);
        equal($m->get('c'), 2);
    });
    check("$name, touch", function () use ($m) {
        $m->set('t', 1);
        equal($m->touch('t', 300), true);
    });
    // In the binary protocol it is a time in 2106.
    $binary || check("$name, negative expiry", function () use ($m) {
        $m->set('past', 1, -1);
        equal($m->get('past'), false);
    });
}
echo "done\n";
