package live

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chartutil"
	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

// values reads YAML.
func values(t *testing.T, text string) map[string]any {
	t.Helper()
	v, err := chartutil.ReadValues([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// testUpgrade takes a store through the upgrades that docs/kubernetes.md names.
func testUpgrade(t *testing.T, s *store) {
	s.install(t, values(t, "{}"))
	memnodes := s.pods(t, "memnode")

	directory, gateway := s.follow(t, "directory"), s.follow(t, "gateway")
	s.upgrade(t, values(t, "image: {tag: v2}"))
	fewest, gone := directory.end(t)
	if got, want := fmt.Sprint(gone), "[kvd-directory-2 kvd-directory-1 kvd-directory-0]"; got != want {
		t.Errorf("directory nodes were replaced in the order %s, want %s", got, want)
	}
	if fewest != 2 {
		t.Errorf("%d directory nodes of 3 were ready at one time, want 2", fewest)
	}
	if fewest, _ := gateway.end(t); fewest < 2 {
		t.Errorf("%d gateways of 2 were ready at one time", fewest)
	}
	for name, p := range s.pods(t, "memnode") {
		if p.UID != memnodes[name].UID {
			t.Errorf("memory node %s was replaced by the upgrade", name)
		}
	}
	s.delete(t, "kvd-memnode-a-1")
	s.images(t, "kvd:v2", "kvd-directory-0", "kvd-directory-1", "kvd-directory-2", "kvd-memnode-a-1")
	s.check(t)

	s.upgrade(t, values(t, `
image: {tag: v2}
directory: {replicas: 5}
memnode: {replicas: 3}
namespaces: [{name: cache, mode: cache}, {name: sessions, replicas: 2}]
janitor: {replicas: 1}
`))
	s.check(t)
	if n := len(s.pods(t, "directory")); n != 5 {
		t.Errorf("%d directory nodes, want 5", n)
	}
	if n := len(s.pods(t, "memnode")); n != 3 {
		t.Errorf("%d memory nodes, want 3", n)
	}
	rollback := action.NewRollback(s.helm)
	rollback.Version, rollback.Wait, rollback.WaitForJobs, rollback.Timeout = 2, true, true, 2*time.Minute
	if err := rollback.Run(name); err != nil {
		s.explain(t)
		t.Fatal(err)
	}
	if n := len(s.pods(t, "memnode")); n != 2 {
		t.Errorf("%d memory nodes after the rollback, want 2", n)
	}
	gateway = s.follow(t, "gateway")
	s.upgrade(t, values(t, "image: {tag: v2}\ngateway: {autoscaling: {enabled: true}}"))
	if fewest, _ := gateway.end(t); fewest < 2 {
		t.Errorf("%d gateways of 2 were ready while an autoscaler came", fewest)
	}
	s.test(t)
	s.uninstall(t)
	claims := s.claims(t)
	s.install(t, values(t, "{}"))
	if again := s.claims(t); !maps.Equal(claims, again) {
		t.Errorf("claims of volumes are %v, and were %v before the store was uninstalled", again, claims)
	}
	s.uninstall(t)
}

// claims are the volumes of claims by name.
func (s *store) claims(t *testing.T) map[string]string {
	t.Helper()
	claims, err := s.client.CoreV1().PersistentVolumeClaims(s.namespace).List(t.Context(), meta.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	of := map[string]string{}
	for _, c := range claims.Items {
		of[c.Name] = c.Spec.VolumeName
	}
	return of
}

// testRefusedUpgrade holds that volumes of another size are refused, that the store goes on as it was, and that the way
// of docs/kubernetes.md to have them replaces no pod.
func testRefusedUpgrade(t *testing.T, s *store) {
	s.install(t, values(t, "{}"))
	before := s.pods(t, "directory")
	if _, err := s.upgrader().Run(name, load(t), values(t, "directory: {storage: {size: 20Gi}}")); err == nil ||
		!strings.Contains(err.Error(), "volumeClaimTemplates") &&
			!strings.Contains(err.Error(), "updates to statefulset spec") {
		t.Errorf("a larger volume: %v", err)
	}
	s.upgrade(t, values(t, "{}"))
	orphan := meta.DeletePropagationOrphan
	if err := s.client.AppsV1().StatefulSets(s.namespace).Delete(t.Context(), "kvd-directory",
		meta.DeleteOptions{PropagationPolicy: &orphan}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the StatefulSet is gone", func(ctx context.Context) error {
		_, err := s.client.AppsV1().StatefulSets(s.namespace).Get(ctx, "kvd-directory", meta.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("want not found: %v", err)
		}
		return nil
	})
	s.upgrade(t, values(t, "directory: {storage: {size: 20Gi}}"))
	for name, p := range s.pods(t, "directory") {
		if p.UID != before[name].UID {
			t.Errorf("%s was replaced", name)
		}
	}
	s.check(t)
	s.uninstall(t)
}

// pods are those of a component, by name.
func (s *store) pods(t *testing.T, component string) map[string]core.Pod {
	t.Helper()
	list, err := s.client.CoreV1().Pods(s.namespace).List(t.Context(),
		meta.ListOptions{LabelSelector: "app.kubernetes.io/component=" + component})
	if err != nil {
		t.Fatal(err)
	}
	of := map[string]core.Pod{}
	for _, p := range list.Items {
		of[p.Name] = p
	}
	return of
}

// delete deletes a pod, and waits for the one that comes instead.
func (s *store) delete(t *testing.T, name string) {
	t.Helper()
	before, err := s.client.CoreV1().Pods(s.namespace).Get(t.Context(), name, meta.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.client.CoreV1().Pods(s.namespace).Delete(t.Context(), name, meta.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, name+" is back", func(ctx context.Context) error {
		p, err := s.client.CoreV1().Pods(s.namespace).Get(ctx, name, meta.GetOptions{})
		if err != nil {
			return err
		}
		if p.UID == before.UID || !ready(p) {
			return fmt.Errorf("it is %s", p.Status.Phase)
		}
		return nil
	})
}

func (s *store) images(t *testing.T, want string, names ...string) {
	t.Helper()
	for _, name := range names {
		p, err := s.client.CoreV1().Pods(s.namespace).Get(t.Context(), name, meta.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Spec.Containers[0].Image; got != want {
			t.Errorf("%s runs %s, want %s", name, got, want)
		}
	}
}

func ready(p *core.Pod) bool {
	return p.DeletionTimestamp == nil && slices.ContainsFunc(p.Status.Conditions, func(c core.PodCondition) bool {
		return c.Type == core.PodReady && c.Status == core.ConditionTrue
	})
}

// A follower sees each state that the pods of a component go through.
type follower struct {
	*store
	selector meta.ListOptions
	watch    watch.Interface
	ended    chan struct{}
	mu       struct {
		sync.Mutex
		ready  map[string]types.UID // pods that are, by name
		fewest int                  // of them at one time
		gone   []string             // names, in the order in which they were deleted
		err    error                // the watch's
	}
}

// follow begins with the pods that are there; end ends it.
func (s *store) follow(t *testing.T, component string) *follower {
	t.Helper()
	f := &follower{store: s, selector: meta.ListOptions{LabelSelector: "app.kubernetes.io/component=" + component},
		ended: make(chan struct{})}
	list, err := s.client.CoreV1().Pods(s.namespace).List(t.Context(), f.selector)
	if err != nil {
		t.Fatal(err)
	}
	f.mu.ready = map[string]types.UID{}
	for _, p := range list.Items {
		if ready(&p) {
			f.mu.ready[p.Name] = p.UID
		}
	}
	f.mu.fewest = len(f.mu.ready)
	opts := f.selector
	opts.ResourceVersion = list.ResourceVersion
	if f.watch, err = s.client.CoreV1().Pods(s.namespace).Watch(t.Context(), opts); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(f.ended)
		for e := range f.watch.ResultChan() {
			f.saw(e)
		}
	}()
	return f
}

func (f *follower) saw(e watch.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p, ok := e.Object.(*core.Pod)
	switch {
	case !ok:
		f.mu.err = apierrors.FromObject(e.Object)
	case e.Type == watch.Deleted:
		f.mu.gone = append(f.mu.gone, p.Name)
		delete(f.mu.ready, p.Name)
	case ready(p):
		f.mu.ready[p.Name] = p.UID
	default:
		delete(f.mu.ready, p.Name)
	}
	f.mu.fewest = min(f.mu.fewest, len(f.mu.ready))
}

// end waits until the watch has come as far as the pods are.
func (f *follower) end(t *testing.T) (fewest int, gone []string) {
	t.Helper()
	eventually(t, "the watch has seen all pods", func(ctx context.Context) error {
		list, err := f.client.CoreV1().Pods(f.namespace).List(ctx, f.selector)
		if err != nil {
			return err
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.mu.err != nil {
			t.Fatalf("the watch of pods with %s: %v", f.selector.LabelSelector, f.mu.err)
		}
		for _, p := range list.Items {
			if f.mu.ready[p.Name] != p.UID {
				return fmt.Errorf("it has not seen %s ready", p.Name)
			}
		}
		return nil
	})
	f.watch.Stop()
	<-f.ended
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.fewest, f.mu.gone
}
