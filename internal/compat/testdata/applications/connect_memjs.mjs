// node connect_memjs.mjs REDIS MEMCACHED DB: express-session in memcached, by its binary protocol.
import session from 'express-session';
import memjs from 'connect-memjs';
import { finish, version } from './check.mjs';
import { checkSessions } from './express_sessions.mjs';

version('connect-memjs');
const Store = memjs(session);
await checkSessions(new Store({ servers: [`127.0.0.1:${process.argv[3]}`], prefix: 'connect-memjs:', timeout: 2, retries: 1 }));

finish();
