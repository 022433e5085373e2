package client_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// TestKeysRotated makes a new key for session tokens every 100 ms, or as soon as everybody has the one before, beside a
// client that goes on, clients that come and go, and connections that are made anew: nothing fails.
func TestKeysRotated(t *testing.T) {
	t.Parallel()
	for _, provider := range []string{"tcp", "shm"} {
		t.Run(provider, func(t *testing.T) {
			r := newRig(t, provider, 2, 5*time.Second)
			r.create(&dirpb.CreateNamespaceRequest{Name: "n", Replicas: 2, BytesPerNode: 16 << 20})
			o := r.options()
			o.Namespace = "n"
			c := r.client(o)
			quiet := r.client(o) // which nobody uses meanwhile
			l := startLoad(t, c, "", 4, nil)
			defer l.halt()
			var wg sync.WaitGroup
			stop := make(chan struct{})
			reconnects := 0
			wg.Go(func() { reconnects = r.comeAndGo(o, stop) })

			rotations, refusals := 0, 0
			want := 30
			if testing.Short() {
				want = 10
			}
			tick := time.NewTicker(100 * time.Millisecond)
			defer tick.Stop()
			for deadline := time.Now().Add(60 * time.Second); rotations < want && time.Now().Before(deadline) &&
				!t.Failed(); {
				<-tick.C
				switch err := r.rotate(false); status.Code(err) {
				case codes.OK:
					rotations++
					if provider == "tcp" && rotations%3 == 0 {
						r.nodes[rotations%2].proxy.cut()
					}
				case codes.FailedPrecondition:
					refusals++ // somebody does not have the key of the last time yet
				default:
					t.Error(err)
				}
			}
			close(stop)
			wg.Wait()
			l.progress(100)
			l.end(c)
			l.end(quiet)
			for key, n := range l.mu.unknown {
				if n > 0 && provider == "shm" { // nobody cuts its connections
					t.Errorf("%d increments of %s have an unknown outcome", n, key)
				}
			}
			if u := r.status().GetKeyUse(); rotations < want || u.GetGeneration() != uint32(1+rotations) {
				t.Errorf("%d rotations, want %d: %v", rotations, want, u)
			}
			t.Logf("%d rotations, %d put off; %d clients came and went", rotations, refusals, reconnects)
		})
	}
}

func (r *rig) rotate(force bool) error {
	return r.admin.CallOnce(r.t.Context(), func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.RotateKey(ctx, &dirpb.RotateKeyRequest{Force: force})
		return err
	})
}

// comeAndGo opens clients, one after the other, writes and reads a key with each and closes it, until stop.
func (r *rig) comeAndGo(o client.Options, stop <-chan struct{}) (n int) {
	ctx := context.Background()
	for ; ; n++ {
		select {
		case <-stop:
			return n
		default:
		}
		c, err := client.Open(ctx, o)
		if err != nil {
			r.t.Errorf("client %d: %v", n, err)
			return n
		}
		key, value := []byte("passing"), fmt.Sprint(n)
		if _, err := c.Put(ctx, key, []byte(value), client.PutOptions{}); err != nil && r.provider == "shm" {
			r.t.Errorf("client %d: put: %v", n, err) // nobody cuts its connections
		} else if it, err := c.Get(ctx, key); err != nil {
			r.t.Errorf("client %d: get: %v", n, err)
		} else if string(it.Value) != value && r.provider == "shm" {
			r.t.Errorf("client %d reads %q", n, it.Value)
		}
		if err := c.Close(); err != nil {
			r.t.Errorf("client %d: close: %v", n, err)
		}
	}
}

// A rotation that is forced makes connections of sessions that have an older key's token wait, and no operation fail.
func TestKeysForced(t *testing.T) {
	r := newRig(t, "tcp", 1, 5*time.Second)
	c := r.client(r.options())
	l := startLoad(t, c, "", 2, nil)
	defer l.halt()
	for range 10 {
		for range 3 {
			if err := r.rotate(true); err != nil {
				t.Fatal(err)
			}
		}
		r.nodes[0].proxy.cut()
		l.progress(50)
	}
	l.end(c)
}
