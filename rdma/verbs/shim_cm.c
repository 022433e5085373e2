//go:build verbs && cgo && linux

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "shim_cm.h"

#define FUNCTIONS(X) \
	X(struct rdma_event_channel *, create_event_channel, (void)) \
	X(void, destroy_event_channel, (struct rdma_event_channel *)) \
	X(int, create_id, (struct rdma_event_channel *, struct rdma_cm_id **, void *, enum rdma_port_space)) \
	X(int, destroy_id, (struct rdma_cm_id *)) \
	X(int, bind_addr, (struct rdma_cm_id *, struct sockaddr *)) \
	X(int, listen, (struct rdma_cm_id *, int)) \
	X(uint16_t, get_src_port, (struct rdma_cm_id *)) \
	X(int, resolve_addr, (struct rdma_cm_id *, struct sockaddr *, struct sockaddr *, int)) \
	X(int, resolve_route, (struct rdma_cm_id *, int)) \
	X(int, connect, (struct rdma_cm_id *, struct rdma_conn_param *)) \
	X(int, accept, (struct rdma_cm_id *, struct rdma_conn_param *)) \
	X(int, establish, (struct rdma_cm_id *)) \
	X(int, reject, (struct rdma_cm_id *, const void *, uint8_t)) \
	X(int, disconnect, (struct rdma_cm_id *)) \
	X(int, init_qp_attr, (struct rdma_cm_id *, struct ibv_qp_attr *, int *)) \
	X(int, get_cm_event, (struct rdma_event_channel *, struct rdma_cm_event **)) \
	X(int, ack_cm_event, (struct rdma_cm_event *))

#define DECLARE(result, name, args) static result (*f_##name) args;
FUNCTIONS(DECLARE)

static pthread_mutex_t load_mu = PTHREAD_MUTEX_INITIALIZER;
static int loaded;

int kvd_cm_load(char *why, size_t n)
{
	int rc = 0;
	pthread_mutex_lock(&load_mu);
	if (!loaded) {
		void *lib = dlopen("librdmacm.so.1", RTLD_NOW);
		if (!lib) {
			snprintf(why, n, "%s", dlerror());
			rc = ENOENT;
		}
#define FIND(result, name, args) \
		if (!rc && !(f_##name = (result (*) args)dlsym(lib, "rdma_" #name))) { \
			snprintf(why, n, "librdmacm.so.1 has no rdma_" #name); \
			rc = ENOSYS; \
		}
		FUNCTIONS(FIND)
		loaded = !rc;
	}
	pthread_mutex_unlock(&load_mu);
	return rc;
}

// The library's functions return 0, or -1 with errno. Some give errno itself, negative.
static int result(int rc)
{
	if (rc == 0)
		return 0;
	return rc != -1 ? rc < 0 ? -rc : rc : errno ? errno : EIO;
}

// CALL clears errno, which not all failures set.
#define CALL(call) (errno = 0, result(call))

int kvd_cm_open(struct rdma_event_channel **out)
{
	errno = 0;
	*out = f_create_event_channel();
	if (!*out)
		return errno ? errno : EIO;
	// Go's poller waits for it.
	fcntl((*out)->fd, F_SETFL, fcntl((*out)->fd, F_GETFL) | O_NONBLOCK);
	return 0;
}

void kvd_cm_close(struct rdma_event_channel *ch) { f_destroy_event_channel(ch); }

int kvd_cm_create(struct rdma_event_channel *ch, struct rdma_cm_id **out)
{
	return CALL(f_create_id(ch, out, NULL, RDMA_PS_TCP));
}

void kvd_cm_destroy(struct rdma_cm_id *id) { f_destroy_id(id); }

static void to_sockaddr(const struct kvd_cm_addr *a, struct sockaddr_storage *s)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };
	memset(s, 0, sizeof *s);
	if (memcmp(a->ip, mapped, sizeof mapped) == 0) {
		struct sockaddr_in *v4 = (struct sockaddr_in *)s;
		v4->sin_family = AF_INET;
		v4->sin_port = htons(a->port);
		memcpy(&v4->sin_addr, a->ip + 12, 4);
	} else {
		struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)s;
		v6->sin6_family = AF_INET6;
		v6->sin6_port = htons(a->port);
		memcpy(&v6->sin6_addr, a->ip, 16);
	}
}

int kvd_cm_listen(struct rdma_cm_id *id, struct kvd_cm_addr *a, int backlog)
{
	struct sockaddr_storage s;
	to_sockaddr(a, &s);
	int rc = CALL(f_bind_addr(id, (struct sockaddr *)&s));
	if (!rc)
		rc = CALL(f_listen(id, backlog));
	if (!rc)
		a->port = ntohs(f_get_src_port(id));
	return rc;
}

int kvd_cm_resolve_addr(struct rdma_cm_id *id, const struct kvd_cm_addr *from, const struct kvd_cm_addr *to, int ms)
{
	struct sockaddr_storage src, dst;
	to_sockaddr(from, &src);
	to_sockaddr(to, &dst);
	return CALL(f_resolve_addr(id, (struct sockaddr *)&src, (struct sockaddr *)&dst, ms));
}

int kvd_cm_resolve_route(struct rdma_cm_id *id, int ms) { return CALL(f_resolve_route(id, ms)); }

int kvd_cm_is_at(struct rdma_cm_id *id, struct ibv_context *c, int port)
{
	return id->verbs && id->port_num == port && strcmp(id->verbs->device->name, c->device->name) == 0;
}

int kvd_cm_connect(struct rdma_cm_id *id, const struct ibv_qp *qp, const uint8_t *data, int len, int initiator_depth,
	int responder_resources)
{
	struct rdma_conn_param p = {
		.private_data = data, .private_data_len = len, .initiator_depth = initiator_depth,
		.responder_resources = responder_resources, .retry_count = 6, .rnr_retry_count = 6, .qp_num = qp->qp_num,
	};
	return CALL(f_connect(id, &p));
}

int kvd_cm_accept(struct rdma_cm_id *id, const struct ibv_qp *qp, int initiator_depth, int responder_resources)
{
	struct rdma_conn_param p = {
		.initiator_depth = initiator_depth, .responder_resources = responder_resources, .rnr_retry_count = 6,
		.qp_num = qp->qp_num,
	};
	return CALL(f_accept(id, &p));
}

int kvd_cm_establish(struct rdma_cm_id *id) { return CALL(f_establish(id)); }

int kvd_cm_reject(struct rdma_cm_id *id) { return CALL(f_reject(id, NULL, 0)); }

void kvd_cm_disconnect(struct rdma_cm_id *id) { f_disconnect(id); }

int kvd_cm_modify(struct rdma_cm_id *id, struct ibv_qp *qp, enum ibv_qp_state state, const struct kvd_path *p)
{
	struct ibv_qp_attr a = { .qp_state = state };
	int mask = 0;
	int rc = CALL(f_init_qp_attr(id, &a, &mask));
	if (rc)
		return rc;
	// What the QP may do was said before, and is not the manager's to say.
	mask &= ~IBV_QP_ACCESS_FLAGS;
	if (state == IBV_QPS_RTR) {
		if (a.path_mtu > p->mtu)
			a.path_mtu = p->mtu;
		a.min_rnr_timer = 12;
		a.max_dest_rd_atomic = p->responder_depth;
		a.ah_attr.sl = p->sl;
		if (a.ah_attr.is_global) {
			a.ah_attr.grh.hop_limit = p->hop_limit;
			a.ah_attr.grh.traffic_class = p->traffic_class;
			a.ah_attr.grh.flow_label = p->flow_label;
		}
	} else {
		a.timeout = p->timeout;
		a.retry_cnt = p->retry;
		a.rnr_retry = p->rnr_retry;
		a.max_rd_atomic = p->initiator_depth;
	}
	return kvd_modify(qp, &a, mask);
}

int kvd_cm_next(struct rdma_event_channel *ch, struct kvd_cm_event *out)
{
	struct rdma_cm_event *e = NULL;
	memset(out, 0, sizeof *out);
	int rc = CALL(f_get_cm_event(ch, &e));
	if (rc)
		return rc;
	out->id = e->id;
	out->type = e->event;
	out->status = e->status;
	if (e->event == RDMA_CM_EVENT_CONNECT_REQUEST || e->event == RDMA_CM_EVENT_CONNECT_RESPONSE ||
		e->event == RDMA_CM_EVENT_ESTABLISHED) {
		const struct rdma_conn_param *c = &e->param.conn;
		out->initiator_depth = c->initiator_depth;
		out->responder_resources = c->responder_resources;
		out->len = c->private_data_len < KVD_CM_PRIVATE ? c->private_data_len : KVD_CM_PRIVATE;
		if (!c->private_data)
			out->len = 0;
		if (out->len)
			memcpy(out->data, c->private_data, out->len);
		if (e->event == RDMA_CM_EVENT_CONNECT_REQUEST)
			out->listener = e->listen_id;
	}
	f_ack_cm_event(e);
	return 0;
}
