//go:build verbs && cgo && linux

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

#include "shim.h"

// verbs.h makes a macro of it.
#undef ibv_query_port

#define FUNCTIONS(X) \
	X(struct ibv_device **, get_device_list, (int *)) \
	X(void, free_device_list, (struct ibv_device **)) \
	X(const char *, get_device_name, (struct ibv_device *)) \
	X(struct ibv_context *, open_device, (struct ibv_device *)) \
	X(int, close_device, (struct ibv_context *)) \
	X(int, query_device, (struct ibv_context *, struct ibv_device_attr *)) \
	X(int, query_port, (struct ibv_context *, uint8_t, struct ibv_port_attr *)) \
	X(int, query_pkey, (struct ibv_context *, uint8_t, int, __be16 *)) \
	X(struct ibv_pd *, alloc_pd, (struct ibv_context *)) \
	X(int, dealloc_pd, (struct ibv_pd *)) \
	X(struct ibv_mr *, reg_mr_iova, (struct ibv_pd *, void *, size_t, uint64_t, int)) \
	X(int, dereg_mr, (struct ibv_mr *)) \
	X(struct ibv_comp_channel *, create_comp_channel, (struct ibv_context *)) \
	X(int, destroy_comp_channel, (struct ibv_comp_channel *)) \
	X(struct ibv_cq *, create_cq, (struct ibv_context *, int, void *, struct ibv_comp_channel *, int)) \
	X(int, destroy_cq, (struct ibv_cq *)) \
	X(int, get_cq_event, (struct ibv_comp_channel *, struct ibv_cq **, void **)) \
	X(void, ack_cq_events, (struct ibv_cq *, unsigned int)) \
	X(struct ibv_qp *, create_qp, (struct ibv_pd *, struct ibv_qp_init_attr *)) \
	X(int, modify_qp, (struct ibv_qp *, struct ibv_qp_attr *, int)) \
	X(int, destroy_qp, (struct ibv_qp *)) \
	X(int, get_async_event, (struct ibv_context *, struct ibv_async_event *)) \
	X(void, ack_async_event, (struct ibv_async_event *)) \
	X(const char *, event_type_str, (enum ibv_event_type))

#define DECLARE(result, name, args) static result (*f_##name) args;
FUNCTIONS(DECLARE)

// Since version 32 of rdma-core; verbs.h has it as an inline.
static ssize_t (*f_query_gid_table)(struct ibv_context *, struct ibv_gid_entry *, size_t, uint32_t, size_t);

static pthread_mutex_t load_mu = PTHREAD_MUTEX_INITIALIZER;
static int loaded;

int kvd_load(char *why, size_t n)
{
	int rc = 0;
	pthread_mutex_lock(&load_mu);
	if (!loaded) {
		void *lib = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_GLOBAL);
		if (!lib) {
			snprintf(why, n, "%s", dlerror());
			rc = ENOENT;
		}
#define FIND(result, name, args) \
		if (!rc && !(f_##name = (result (*) args)dlsym(lib, "ibv_" #name))) { \
			snprintf(why, n, "libibverbs.so.1 has no ibv_" #name); \
			rc = ENOSYS; \
		}
		FUNCTIONS(FIND)
		if (!rc)
			f_query_gid_table = dlsym(lib, "_ibv_query_gid_table");
		loaded = !rc;
	}
	pthread_mutex_unlock(&load_mu);
	return rc;
}

// A call that failed without setting errno still failed.
static int failed(void) { return errno ? errno : EIO; }

struct ibv_device **kvd_list(int *n)
{
	errno = 0;
	struct ibv_device **l = f_get_device_list(n);
	if (!l)
		*n = -failed();
	return l;
}

void kvd_free_list(struct ibv_device **l) { f_free_device_list(l); }

const char *kvd_name(struct ibv_device *d) { return f_get_device_name(d); }

void kvd_describe(struct ibv_device *d, struct kvd_device *out, struct ibv_gid_entry *gids, int n)
{
	memset(out, 0, sizeof *out);
	out->name = f_get_device_name(d);
	out->iwarp = d->transport_type == IBV_TRANSPORT_IWARP;
	errno = 0;
	struct ibv_context *c = f_open_device(d);
	if (!c) {
		out->err = failed();
		return;
	}
	out->err = f_query_device(c, &out->attr);
	for (int i = 0; !out->err && i < out->attr.phys_port_cnt && i < 8; i++)
		out->err = f_query_port(c, i + 1, &out->port[i]);
	out->gids = -1;
	if (f_query_gid_table) {
		ssize_t got = f_query_gid_table(c, gids, n, 0, sizeof gids[0]);
		out->gids = got < 0 ? -1 : (int)got;
	}
	f_close_device(c);
}

int kvd_open(struct ibv_device *d, struct ibv_context **out)
{
	errno = 0;
	*out = f_open_device(d);
	if (!*out)
		return failed();
	// Both descriptors are waited for by Go's poller.
	fcntl((*out)->async_fd, F_SETFL, fcntl((*out)->async_fd, F_GETFL) | O_NONBLOCK);
	return 0;
}

int kvd_close(struct ibv_context *c) { return f_close_device(c); }

int kvd_alloc_pd(struct ibv_context *c, struct ibv_pd **out)
{
	errno = 0;
	*out = f_alloc_pd(c);
	return *out ? 0 : failed();
}

int kvd_dealloc_pd(struct ibv_pd *pd) { return f_dealloc_pd(pd); }

int kvd_reg_mr(struct ibv_pd *pd, uint64_t addr, size_t len, uint64_t iova, int access, struct ibv_mr **out)
{
	errno = 0;
	*out = f_reg_mr_iova(pd, (void *)(uintptr_t)addr, len, iova, access);
	return *out ? 0 : failed();
}

int kvd_dereg_mr(struct ibv_mr *mr) { return f_dereg_mr(mr); }

int kvd_create_cq(struct ibv_context *c, int depth, struct ibv_cq **cq, struct ibv_comp_channel **ch)
{
	errno = 0;
	*ch = f_create_comp_channel(c);
	if (!*ch)
		return failed();
	fcntl((*ch)->fd, F_SETFL, fcntl((*ch)->fd, F_GETFL) | O_NONBLOCK);
	errno = 0;
	*cq = f_create_cq(c, depth, NULL, *ch, 0);
	if (!*cq) {
		int rc = failed();
		f_destroy_comp_channel(*ch);
		return rc;
	}
	return 0;
}

int kvd_destroy_cq(struct ibv_cq *cq, struct ibv_comp_channel *ch)
{
	int rc = f_destroy_cq(cq);
	return rc ? rc : f_destroy_comp_channel(ch);
}

int kvd_arm(struct ibv_cq *cq) { return ibv_req_notify_cq(cq, 0); }

int kvd_events(struct ibv_comp_channel *ch)
{
	struct ibv_cq *cq;
	void *ctx;
	int n = 0;
	errno = 0;
	while (f_get_cq_event(ch, &cq, &ctx) == 0) {
		f_ack_cq_events(cq, 1);
		n++;
		errno = 0;
	}
	return n > 0 || errno == EAGAIN || errno == EINTR ? n : -failed();
}

static int64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

int kvd_poll(struct ibv_cq *cq, struct kvd_wc *out, int n, int64_t spin)
{
	struct ibv_wc wcs[16];
	int got = 0, end = spin <= 0, tries = 0;
	int64_t until = 0;
	if (n > 16)
		n = 16;
	for (;;) {
		got = ibv_poll_cq(cq, n, wcs);
		if (got != 0 || end)
			break;
		relax();
		if (++tries % 8 == 0) {
			int64_t t = now();
			if (!until)
				until = t + spin;
			end = t >= until;
		}
	}
	for (int i = 0; i < got; i++) {
		out[i].id = wcs[i].wr_id;
		out[i].qpn = wcs[i].qp_num;
		out[i].status = wcs[i].status;
		out[i].vendor = wcs[i].vendor_err;
		out[i].recv = wcs[i].status == IBV_WC_SUCCESS && (wcs[i].opcode & IBV_WC_RECV) != 0;
	}
	return got;
}

int kvd_create_qp(struct ibv_pd *pd, struct ibv_cq *cq, int send_wr, int recv_wr, int sge, int inl, struct ibv_qp **out,
	int *got_inline)
{
	struct ibv_qp_init_attr a = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = send_wr, .max_recv_wr = recv_wr, .max_send_sge = sge, .max_recv_sge = 1, .max_inline_data = inl },
	};
	errno = 0;
	*out = f_create_qp(pd, &a);
	*got_inline = a.cap.max_inline_data;
	return *out ? 0 : failed();
}

int kvd_query_pkey(struct ibv_context *c, int port, int index, uint16_t *pkey)
{
	__be16 p = 0;
	errno = 0;
	if (f_query_pkey(c, port, index, &p))
		return failed();
	*pkey = ntohs(p);
	return 0;
}

int kvd_init_qp(struct ibv_qp *qp, int port, int pkey_index, int access)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = port, .pkey_index = pkey_index,
		.qp_access_flags = access };
	int mask = IBV_QP_STATE | IBV_QP_ACCESS_FLAGS;
	if (qp->context->device->transport_type != IBV_TRANSPORT_IWARP)
		mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT;
	return f_modify_qp(qp, &a, mask);
}

int kvd_rtr(struct ibv_qp *qp, const struct kvd_path *p)
{
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_RTR, .path_mtu = p->mtu, .dest_qp_num = p->qpn, .rq_psn = p->recv_psn,
		.max_dest_rd_atomic = p->responder_depth, .min_rnr_timer = 12,
		.ah_attr = { .dlid = p->lid, .sl = p->sl, .port_num = p->port, .is_global = p->global },
	};
	if (p->global) {
		memcpy(a.ah_attr.grh.dgid.raw, p->gid, 16);
		a.ah_attr.grh.sgid_index = p->gid_index;
		a.ah_attr.grh.hop_limit = p->hop_limit;
		a.ah_attr.grh.traffic_class = p->traffic_class;
		a.ah_attr.grh.flow_label = p->flow_label;
	}
	return f_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

int kvd_rts(struct ibv_qp *qp, const struct kvd_path *p)
{
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_RTS, .sq_psn = p->send_psn, .timeout = p->timeout, .retry_cnt = p->retry,
		.rnr_retry = p->rnr_retry, .max_rd_atomic = p->initiator_depth,
	};
	return f_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
		IBV_QP_MAX_QP_RD_ATOMIC);
}

int kvd_modify(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask) { return f_modify_qp(qp, a, mask); }

int kvd_err(struct ibv_qp *qp)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_ERR };
	return f_modify_qp(qp, &a, IBV_QP_STATE);
}

int kvd_destroy_qp(struct ibv_qp *qp) { return f_destroy_qp(qp); }

struct slot {
	struct ibv_send_wr wr;
	struct ibv_sge sge[1 + KVD_MORE_SGES];
};

size_t kvd_scratch_size(int n) { return sizeof(struct slot) * n; }

int kvd_post(struct ibv_qp *qp, const struct kvd_wr *wrs, const struct kvd_sge *more, int n, void *scratch, int *done)
{
	struct slot *s = scratch;
	for (int i = 0; i < n; i++) {
		const struct kvd_wr *w = &wrs[i];
		s[i].sge[0].addr = w->local;
		s[i].sge[0].length = w->len;
		s[i].sge[0].lkey = w->lkey;
		for (int k = 0; k < w->more; k++) {
			const struct kvd_sge *m = &more[i * KVD_MORE_SGES + k];
			s[i].sge[1 + k].addr = m->addr;
			s[i].sge[1 + k].length = m->len;
			s[i].sge[1 + k].lkey = m->lkey;
		}
		s[i].wr.wr_id = w->id;
		s[i].wr.next = i + 1 < n ? &s[i + 1].wr : NULL;
		s[i].wr.sg_list = s[i].sge;
		s[i].wr.num_sge = 1 + w->more;
		s[i].wr.opcode = w->op;
		s[i].wr.send_flags = w->flags;
		if (w->op == IBV_WR_ATOMIC_CMP_AND_SWP || w->op == IBV_WR_ATOMIC_FETCH_AND_ADD) {
			s[i].wr.wr.atomic.remote_addr = w->remote;
			s[i].wr.wr.atomic.rkey = w->rkey;
			if (w->op == IBV_WR_ATOMIC_CMP_AND_SWP) {
				s[i].wr.wr.atomic.compare_add = w->compare;
				s[i].wr.wr.atomic.swap = w->swap;
			} else {
				s[i].wr.wr.atomic.compare_add = w->swap;
				s[i].wr.wr.atomic.swap = 0;
			}
		} else {
			s[i].wr.wr.rdma.remote_addr = w->remote;
			s[i].wr.wr.rdma.rkey = w->rkey;
		}
	}
	struct ibv_send_wr *bad = NULL;
	int rc = ibv_post_send(qp, &s[0].wr, &bad);
	*done = n;
	if (rc) {
		*done = bad ? (int)((struct slot *)bad - s) : 0;
		if (rc < 0)
			rc = -rc;
	}
	return rc;
}

int kvd_post_recv(struct ibv_qp *qp, uint64_t id, uint64_t addr, uint32_t len, uint32_t lkey)
{
	struct ibv_sge sge = { .addr = addr, .length = len, .lkey = lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;
	return ibv_post_recv(qp, &wr, &bad);
}

int kvd_async(struct ibv_context *c)
{
	struct ibv_async_event e;
	errno = 0;
	if (f_get_async_event(c, &e))
		return -failed();
	f_ack_async_event(&e);
	return e.event_type;
}

const char *kvd_event_name(int type) { return f_event_type_str(type); }
