// node keyv_memcache.mjs REDIS MEMCACHED DB: Keyv in memcached, whose client speaks the binary protocol.
import KeyvMemcache from '@keyv/memcache';
import Keyv from 'keyv';
import { finish, version } from './check.mjs';
import { checkKeyv } from './keyv_any.mjs';

version('@keyv/memcache');
const keyv = new Keyv(new KeyvMemcache(`127.0.0.1:${process.argv[3]}`), { namespace: 'keyv-memcache' });
keyv.on('error', () => {});
await checkKeyv(keyv);

finish();
