// Package live installs the chart in ../kvd into a control plane of Kubernetes, for each file of values of the render
// tests: the API server, its admission, controllers and scheduler as they are, and cert-manager's controllers. It has a
// module of its own, for what it takes to build those.
package live

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/release"
	core "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	cliresource "k8s.io/cli-runtime/pkg/resource"
	"k8s.io/client-go/discovery"
)

const chartDir, valuesDir, name = "../kvd", "../render/testdata", "kvd"

// privileged are the files of values whose memory nodes the Pod Security Standard "restricted" refuses, as
// docs/kubernetes.md says.
var privileged = map[string]bool{"rdma": true, "daemonset": true}

func TestInstall(t *testing.T) {
	c := newCluster(t)
	c.authority(t)
	files, err := filepath.Glob(filepath.Join(valuesDir, "*.yaml"))
	if err != nil || len(files) < 9 {
		t.Fatalf("%d files of values, want 9: %v", len(files), err)
	}
	for _, file := range files {
		values := strings.TrimSuffix(filepath.Base(file), ".yaml")
		t.Run(values, func(t *testing.T) {
			level := "restricted"
			if privileged[values] {
				level = "privileged"
			}
			s := c.namespace(t, values, level)
			v := read(t, file)
			s.secrets(t)
			s.strict(t, v)
			s.install(t, v)
			if privileged[values] {
				s.refused(t, v)
			}
			s.check(t)
			s.test(t)
			s.uninstall(t)
		})
	}
	t.Run("upgrade", func(t *testing.T) { testUpgrade(t, c.namespace(t, "upgrades", "restricted")) })
	t.Run("refused", func(t *testing.T) { testRefusedUpgrade(t, c.namespace(t, "refusals", "restricted")) })
}

func read(t *testing.T, file string) map[string]any {
	t.Helper()
	v, err := chartutil.ReadValuesFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// A store is a namespace for one release.
type store struct {
	*cluster
	namespace string
	helm      *action.Configuration
}

// namespace makes one with a level of Pod Security and a quota, for which every container has to say what it takes.
func (c *cluster) namespace(t *testing.T, values, level string) *store {
	t.Helper()
	s := &store{cluster: c, namespace: "store-" + values, helm: &action.Configuration{}}
	labels := map[string]string{"pod-security.kubernetes.io/enforce": level,
		"pod-security.kubernetes.io/enforce-version": "latest"}
	if _, err := c.client.CoreV1().Namespaces().Create(t.Context(),
		&core.Namespace{ObjectMeta: meta.ObjectMeta{Name: s.namespace, Labels: labels}}, meta.CreateOptions{}); err !=
		nil {
		t.Fatal(err)
	}
	quota := &core.ResourceQuota{ObjectMeta: meta.ObjectMeta{Name: "quota"}, Spec: core.ResourceQuotaSpec{
		Hard: core.ResourceList{
			"pods": resource.MustParse("40"), "requests.cpu": resource.MustParse("40"),
			"requests.memory": resource.MustParse("8Ti"),
			"limits.memory":   resource.MustParse("8Ti"), "persistentvolumeclaims": resource.MustParse("5"),
		}}}
	if _, err := c.client.CoreV1().ResourceQuotas(s.namespace).Create(t.Context(), quota, meta.CreateOptions{}); err !=
		nil {
		t.Fatal(err)
	}
	eventually(t, "the namespace has its account", func(ctx context.Context) error {
		_, err := c.client.CoreV1().ServiceAccounts(s.namespace).Get(ctx, "default", meta.GetOptions{})
		return err
	})
	flags := genericclioptions.NewConfigFlags(false)
	flags.KubeConfig, flags.Namespace = &c.kubeconfig, &s.namespace
	if err := s.helm.Init(flags, s.namespace, "secret", func(string, ...any) {}); err != nil {
		t.Fatal(err)
	}
	return s
}

// authority is the ClusterIssuer that a file of values names, as an operator of a cluster has one.
func (c *cluster) authority(t *testing.T) {
	t.Helper()
	issuers := schema.GroupVersionResource{Group: "cert-manager.io", Version: "v1", Resource: "clusterissuers"}
	certificates := schema.GroupVersionResource{Group: "cert-manager.io", Version: "v1", Resource: "certificates"}
	if _, err := c.client.CoreV1().Namespaces().Create(t.Context(),
		&core.Namespace{ObjectMeta: meta.ObjectMeta{Name: "cert-manager"}}, meta.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	create := func(of schema.GroupVersionResource, namespace, kind, name string, spec map[string]any) {
		t.Helper()
		o := &unstructured.Unstructured{
			Object: map[string]any{"apiVersion": "cert-manager.io/v1", "kind": kind, "metadata": map[string]any{
				"name": name}, "spec": spec}}
		var err error
		if namespace == "" {
			_, err = c.objects.Resource(of).Create(t.Context(), o, meta.CreateOptions{})
		} else {
			_, err = c.objects.Resource(of).Namespace(namespace).Create(t.Context(), o, meta.CreateOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	create(issuers, "", "ClusterIssuer", "self", map[string]any{"selfSigned": map[string]any{}})
	create(certificates, "cert-manager", "Certificate", "store", map[string]any{"isCA": true, "commonName": "store",
		"secretName": "store",
		"issuerRef":  map[string]any{"kind": "ClusterIssuer", "name": "self"}})
	create(issuers, "", "ClusterIssuer", "store", map[string]any{"ca": map[string]any{"secretName": "store"}})
}

// secrets makes those that files of values name.
func (s *store) secrets(t *testing.T) {
	t.Helper()
	for _, name := range []string{"kvd-d", "kvd-m", "kvd-g", "kvd-op", "users", "registry"} {
		if _, err := s.client.CoreV1().Secrets(s.namespace).Create(t.Context(),
			&core.Secret{ObjectMeta: meta.ObjectMeta{Name: name}}, meta.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

func load(t *testing.T) *chart.Chart {
	t.Helper()
	c, err := loader.Load(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// manifest is what the chart gives with values, as the API server's kinds are.
func (s *store) manifest(t *testing.T, values map[string]any) []*cliresource.Info {
	t.Helper()
	i := s.installer()
	i.DryRun, i.DryRunOption, i.Wait, i.Replace = true, "server", false, true
	r, err := i.Run(load(t), values)
	if err != nil {
		t.Fatal(err)
	}
	infos, err := s.helm.KubeClient.Build(strings.NewReader(r.Manifest), true)
	if err != nil {
		t.Fatal(err)
	}
	return infos
}

func (s *store) installer() *action.Install {
	i := action.NewInstall(s.helm)
	i.ReleaseName, i.Namespace, i.Wait, i.WaitForJobs, i.Timeout = name, s.namespace, true, true, 2*time.Minute
	return i
}

// strict has the API server read each object, and refuse any field that it does not know.
func (s *store) strict(t *testing.T, values map[string]any) {
	t.Helper()
	for _, info := range s.manifest(t, values) {
		o, ok := info.Object.(*unstructured.Unstructured)
		if !ok {
			t.Fatalf("%s: %T", info.ObjectName(), info.Object)
		}
		opts := meta.CreateOptions{DryRun: []string{meta.DryRunAll}, FieldValidation: meta.FieldValidationStrict}
		if _, err := s.objects.Resource(info.Mapping.Resource).Namespace(s.namespace).Create(t.Context(), o,
			opts); err != nil {
			t.Errorf("%s: %v", info.ObjectName(), err)
		}
	}
}

// refused holds that the memory nodes' pods need the level that their namespace has.
func (s *store) refused(t *testing.T, values map[string]any) {
	t.Helper()
	labels := `{"metadata": {"labels": {"pod-security.kubernetes.io/enforce": %q}}}`
	level := func(l string) {
		t.Helper()
		if _, err := s.client.CoreV1().Namespaces().Patch(t.Context(), s.namespace, "application/merge-patch+json",
			fmt.Appendf(nil, labels, l), meta.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	level("baseline")
	defer level("privileged")
	for _, info := range s.manifest(t, values) {
		o := info.Object.(*unstructured.Unstructured)
		if info.Name != name+"-memnode-a" {
			continue
		}
		pod := &unstructured.Unstructured{Object: map[string]any{}}
		pod.Object, _, _ = unstructured.NestedMap(o.Object, "spec", "template")
		pod.SetAPIVersion("v1")
		pod.SetKind("Pod")
		pod.SetName("tried")
		_, err := s.objects.Resource(core.SchemeGroupVersion.WithResource("pods")).Namespace(s.namespace).Create(
			t.Context(), pod, meta.CreateOptions{DryRun: []string{meta.DryRunAll}})
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "PodSecurity") {
			t.Errorf("%s under the standard baseline: %v", info.ObjectName(), err)
		}
		return
	}
	t.Error("there are no memory nodes")
}

func (s *store) install(t *testing.T, values map[string]any) *release.Release {
	t.Helper()
	began := time.Now()
	r, err := s.installer().Run(load(t), values)
	if err != nil {
		s.explain(t)
		t.Fatal(err)
	}
	t.Logf("installed in %v\n%s", time.Since(began).Round(time.Second/10), r.Info.Notes)
	return r
}

func (s *store) upgrader() *action.Upgrade {
	u := action.NewUpgrade(s.helm)
	u.Namespace, u.Wait, u.WaitForJobs, u.Timeout = s.namespace, true, true, 2*time.Minute
	return u
}

func (s *store) upgrade(t *testing.T, values map[string]any) {
	t.Helper()
	if _, err := s.upgrader().Run(name, load(t), values); err != nil {
		s.explain(t)
		t.Fatal(err)
	}
}

// explain prints the warnings of a namespace.
func (s *store) explain(t *testing.T) {
	t.Helper()
	events, err := s.client.CoreV1().Events(s.namespace).List(t.Context(), meta.ListOptions{})
	if err != nil {
		t.Error(err)
		return
	}
	for _, e := range events.Items {
		if e.Type == core.EventTypeWarning {
			t.Logf("%s %s: %s: %s", e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Reason, e.Message)
		}
	}
}

func (s *store) test(t *testing.T) {
	t.Helper()
	a := action.NewReleaseTesting(s.helm)
	a.Namespace, a.Timeout = s.namespace, 2*time.Minute
	if _, err := a.Run(name); err != nil {
		s.explain(t)
		t.Fatalf("helm test: %v", err)
	}
}

// check looks at what an installed release has made.
func (s *store) check(t *testing.T) {
	t.Helper()
	pods, err := s.client.CoreV1().Pods(s.namespace).List(t.Context(), meta.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(pods.Items) == 0 {
		t.Error("there are no pods")
	}
	for _, p := range pods.Items {
		s.checkVolumes(t, &p)
	}
	s.checkCertificates(t)
	s.checkStorage(t)
	s.checkBudgets(t)
	s.checkServices(t, pods.Items)
}

// checkVolumes sees that whatever a pod mounts comes to be: a machine does not start it before.
func (s *store) checkVolumes(t *testing.T, p *core.Pod) {
	t.Helper()
	for _, v := range p.Spec.Volumes {
		if v.Secret != nil {
			eventually(t, p.Name+" has its Secret "+v.Secret.SecretName, func(ctx context.Context) error {
				_, err := s.client.CoreV1().Secrets(s.namespace).Get(ctx, v.Secret.SecretName, meta.GetOptions{})
				return err
			})
		}
	}
}

// checkCertificates sees that cert-manager could make each certificate, with a role and for the name that is asked for.
func (s *store) checkCertificates(t *testing.T) {
	t.Helper()
	all, err := s.client.CoreV1().Secrets(s.namespace).List(t.Context(), meta.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range all.Items {
		if secret.Annotations["cert-manager.io/certificate-name"] == "" {
			continue
		}
		block, _ := pem.Decode(secret.Data["tls.crt"])
		if block == nil {
			t.Errorf("%s: no certificate", secret.Name)
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Errorf("%s: %v", secret.Name, err)
			continue
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(secret.Data["ca.crt"])
		opts := x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
		if !c.IsCA {
			opts.DNSName = "kvd.internal"
			if len(c.URIs) != 1 || !strings.HasPrefix(c.URIs[0].String(), "spiffe://"+s.namespace+
				".cluster.local/kvd/") {
				t.Errorf("%s: it is of %v", secret.Name, c.URIs)
			}
		}
		if _, err := c.Verify(opts); err != nil {
			t.Errorf("%s: %v", secret.Name, err)
		}
	}
}

// checkStorage sees that every directory node has a volume of its own.
func (s *store) checkStorage(t *testing.T) {
	t.Helper()
	directory, err := s.client.AppsV1().StatefulSets(s.namespace).List(t.Context(),
		meta.ListOptions{LabelSelector: "app.kubernetes.io/component=directory"})
	if err != nil || len(directory.Items) != 1 {
		t.Fatalf("%d directories: %v", len(directory.Items), err)
	}
	claims, err := s.client.CoreV1().PersistentVolumeClaims(s.namespace).List(t.Context(), meta.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(claims.Items) != int(*directory.Items[0].Spec.Replicas) {
		t.Errorf("%d claims for %d directory nodes", len(claims.Items), *directory.Items[0].Spec.Replicas)
	}
	for _, claim := range claims.Items {
		if claim.Status.Phase != core.ClaimBound {
			t.Errorf("claim %s is %s", claim.Name, claim.Status.Phase)
		}
	}
}

// checkBudgets sees that each budget lets go of as many pods as it says, which it does not of kinds that it cannot
// count.
func (s *store) checkBudgets(t *testing.T) {
	t.Helper()
	budgets, err := s.client.PolicyV1().PodDisruptionBudgets(s.namespace).List(t.Context(), meta.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range budgets.Items {
		eventually(t, "budget "+b.Name, func(ctx context.Context) error {
			got, err := s.client.PolicyV1().PodDisruptionBudgets(s.namespace).Get(ctx, b.Name, meta.GetOptions{})
			if err != nil {
				return err
			}
			allowed := got.Spec.MaxUnavailable.IntVal
			if got.Status.ObservedGeneration != got.Generation || got.Status.DisruptionsAllowed != allowed ||
				got.Status.ExpectedPods == 0 ||
				slices.ContainsFunc(got.Status.Conditions, func(c meta.Condition) bool {
					return c.Reason == policy.SyncFailedReason
				}) {
				return fmt.Errorf("want %d allowed: %+v", allowed, got.Status)
			}
			return nil
		})
	}
}

// checkServices sees that each Service has the ready pods that it selects, at every port that it has.
func (s *store) checkServices(t *testing.T, pods []core.Pod) {
	t.Helper()
	services, err := s.client.CoreV1().Services(s.namespace).List(t.Context(), meta.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, service := range services.Items {
		want := 0
		for _, p := range pods {
			if labels := p.Labels; !slices.ContainsFunc(slices.Collect(maps.Keys(service.Spec.Selector)),
				func(k string) bool {
					return labels[k] != service.Spec.Selector[k]
				}) {
				want++
			}
		}
		eventually(t, "service "+service.Name, func(ctx context.Context) error {
			slices, err := s.client.DiscoveryV1().EndpointSlices(s.namespace).List(
				ctx, meta.ListOptions{LabelSelector: "kubernetes.io/service-name=" + service.Name})
			if err != nil {
				return err
			}
			got := 0
			for _, slice := range slices.Items {
				for _, e := range slice.Endpoints {
					if e.Conditions.Ready != nil && *e.Conditions.Ready && len(slice.Ports) == len(service.Spec.Ports) {
						got++
					}
				}
			}
			if got != want || want == 0 {
				return fmt.Errorf("%d pods at all its ports, want %d", got, want)
			}
			return nil
		})
	}
}

// uninstall sees that nothing is left of a release but what docs/kubernetes.md says: volumes, and Secrets that
// cert-manager has made.
func (s *store) uninstall(t *testing.T) {
	t.Helper()
	u := action.NewUninstall(s.helm)
	u.Wait, u.Timeout = true, 2*time.Minute
	if _, err := u.Run(name); err != nil {
		t.Fatal(err)
	}
	eventually(t, "nothing is left", func(ctx context.Context) error {
		left, err := s.left(ctx)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("there are %v", left)
		}
		return err
	})
}

// left lists the objects of a namespace that were not there before, but for what has to stay.
func (s *store) left(ctx context.Context) (names []string, err error) {
	_, lists, err := s.client.Discovery().ServerGroupsAndResourcesWithContext(ctx)
	if err != nil {
		return nil, err
	}
	for _, list := range discovery.FilteredBy(discovery.SupportsAllVerbs{Verbs: []string{"list", "delete"}}, lists) {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return nil, err
		}
		for _, r := range list.APIResources {
			if !r.Namespaced || r.Kind == "Event" || r.Kind == "Endpoints" {
				continue // Endpoints are EndpointSlices again
			}
			all, err := s.objects.Resource(gv.WithResource(r.Name)).Namespace(s.namespace).List(ctx, meta.ListOptions{})
			if err != nil {
				return nil, fmt.Errorf("%s: %w", r.Name, err)
			}
			for _, o := range all.Items {
				if !stays(&o) {
					names = append(names, o.GetKind()+"/"+o.GetName())
				}
			}
		}
	}
	return names, nil
}

func stays(o *unstructured.Unstructured) bool {
	switch o.GetKind() + "/" + o.GetName() {
	case "ServiceAccount/default", "ConfigMap/kube-root-ca.crt", "ResourceQuota/quota":
		return true
	}
	switch o.GetKind() {
	case "PersistentVolumeClaim":
		return strings.HasPrefix(o.GetName(), "data-")
	case "Secret":
		_, made := o.GetAnnotations()["cert-manager.io/certificate-name"]
		return made || slices.Contains([]string{"kvd-d", "kvd-m", "kvd-g", "kvd-op", "users", "registry"}, o.GetName())
	}
	return false
}
