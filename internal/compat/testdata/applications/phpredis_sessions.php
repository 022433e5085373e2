<?php
// phpredis_sessions.php REDIS MEMCACHED DB: PHP's sessions in Redis, with locks.
require __DIR__ . '/check.php';
require __DIR__ . '/sessions.php';

version(phpversion('redis'));
check_sessions([
    'session.save_handler' => 'redis',
    'session.save_path' => "\"tcp://127.0.0.1:$redis?database=$db&timeout=5&read_timeout=5&prefix=phpredis:\"",
    'redis.session.locking_enabled' => '1',
    'redis.session.lock_expire' => '60',
    'redis.session.lock_wait_time' => '10000',
    'redis.session.lock_retries' => '500',
], 'locked');
echo "done\n";
