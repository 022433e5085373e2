package live

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	_ "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1" // controller-gen reads it
	core "k8s.io/api/core/v1"
	storage "k8s.io/api/storage/v1"
	extensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	extensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	nodestages "sigs.k8s.io/kwok/kustomize/stage/node/fast"
	podstages "sigs.k8s.io/kwok/kustomize/stage/pod/fast"
	"sigs.k8s.io/yaml"
)

const token = "of-the-test"

// A cluster is a control plane: etcd, the API server, its controllers, the scheduler and cert-manager as processes of
// their own. Its machines are kwok's, which sets the states of pods that are there by name only.
type cluster struct {
	dir, kubeconfig string
	config          *rest.Config
	client          *kubernetes.Clientset
	objects         *dynamic.DynamicClient
	processes       []*process
}

// A process is one program of the control plane.
type process struct {
	name string
	cmd  *exec.Cmd
	log  string
	done chan struct{}
}

// start starts a program of the cluster, and fails the test if it ends before the test does.
func (c *cluster) start(t *testing.T, name string, args ...string) {
	t.Helper()
	p := &process{name: name, log: filepath.Join(c.dir, name+".log"), done: make(chan struct{})}
	p.cmd = exec.Command(filepath.Join(c.dir, "cluster"), append([]string{name}, args...)...)
	out, err := os.Create(p.log)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	p.cmd.Stdout, p.cmd.Stderr, p.cmd.Dir = out, out, c.dir
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait() // how it ended is in its log
		close(p.done)
	}()
	c.processes = append(c.processes, p)
}

// stop ends all processes, the last one first, and says which ended before.
func (c *cluster) stop(t *testing.T) {
	for i := len(c.processes) - 1; i >= 0; i-- {
		p := c.processes[i]
		select {
		case <-p.done:
			t.Errorf("%s ended by itself: %s", p.name, tail(p.log))
			continue
		default:
		}
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may be gone by now
		select {
		case <-p.done:
		case <-time.After(10 * time.Second):
			_ = p.cmd.Process.Kill()
			<-p.done
		}
		if u, ok := p.cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
			t.Logf("%s: %d MiB at most, %v of processors", p.name, u.Maxrss>>10,
				(p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()).Round(time.Second/10))
		}
	}
}

// tail is the end of a log.
func tail(name string) string {
	b, err := os.ReadFile(name)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-3000):])
}

// port is one that nobody listens on.
func port(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, p, _ := net.SplitHostPort(l.Addr().String())
	return p
}

// newCluster builds and starts one; it is there until the test has ended.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{dir: t.TempDir()}
	began := time.Now()
	version := strings.TrimSpace(output(t, exec.Command("go", "list", "-m", "-f", "{{.Version}}", "k8s.io/kubernetes")))
	parts := strings.Split(strings.TrimPrefix(version, "v"), ".")
	stamp := fmt.Sprintf("-s -w -X %[1]s.gitVersion=%[2]s -X %[1]s.gitMajor=%[3]s -X %[1]s.gitMinor=%[4]s",
		"k8s.io/component-base/version", version, parts[0], parts[1])
	output(t, exec.Command("go", "build", "-ldflags", stamp, "-o", c.dir, "./cluster"))
	t.Logf("built in %v", time.Since(began).Round(time.Second))
	began = time.Now()
	t.Cleanup(func() { c.stop(t) })
	store, peers, api := "http://127.0.0.1:"+port(t), "http://127.0.0.1:"+port(t), port(t)
	c.start(t, "etcd", "--data-dir="+filepath.Join(c.dir, "etcd.data"), "--unsafe-no-fsync", "--listen-client-urls="+
		store, "--advertise-client-urls="+store,
		"--listen-peer-urls="+peers, "--initial-advertise-peer-urls="+peers, "--initial-cluster=default="+peers)
	key := c.write(t, "accounts.key", accountKey(t))
	tokens := c.write(t, "tokens.csv", []byte(token+`,test,test,"system:masters"`))
	c.start(t, "kube-apiserver", "--etcd-servers="+store, "--bind-address=127.0.0.1", "--secure-port="+api,
		"--cert-dir="+filepath.Join(c.dir, "api"),
		"--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=Node,RBAC",
		"--token-auth-file="+tokens,
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+key,
		"--service-account-signing-key-file="+key)
	c.connect(t, "https://127.0.0.1:"+api)
	c.start(t, "kube-controller-manager", "--kubeconfig="+c.kubeconfig, "--leader-elect=false", "--secure-port=0",
		"--use-service-account-credentials",
		"--service-account-private-key-file="+key, "--root-ca-file="+c.config.CAFile)
	c.start(t, "kube-scheduler", "--kubeconfig="+c.kubeconfig, "--leader-elect=false", "--secure-port=0")
	c.start(t, "kwok", "--kubeconfig="+c.kubeconfig, "--manage-all-nodes", "--node-lease-duration-seconds=40",
		"--cidr=10.244.0.1/16", "--config="+c.write(t, "stages.yaml", stages(t)))
	c.define(t)
	c.start(t, "cert-manager", "--kubeconfig="+c.kubeconfig)
	c.furnish(t)
	t.Logf("started in %v", time.Since(began).Round(time.Second/10))
	return c
}

func (c *cluster) write(t *testing.T, name string, data []byte) string {
	t.Helper()
	name = filepath.Join(c.dir, name)
	if err := os.WriteFile(name, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// accountKey signs tokens of service accounts.
func accountKey(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
}

func TestMain(m *testing.M) {
	log.SetOutput(io.Discard) // of each symbolic link in a chart
	os.Exit(m.Run())
}

// stages are kwok's own for machines and pods, and one for the pod of `helm test`, which ends by itself as a job's
// does.
func stages(t *testing.T) []byte {
	t.Helper()
	own, err := os.ReadFile("testdata/stages.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return []byte(strings.Join([]string{nodestages.DefaultNodeInit, podstages.DefaultPodReady,
		podstages.DefaultPodComplete, podstages.DefaultPodDelete, string(own)}, "\n---\n"))
}

// connect waits until the API server answers.
func (c *cluster) connect(t *testing.T, url string) {
	t.Helper()
	ca := filepath.Join(c.dir, "api", "apiserver.crt") // it signs itself
	c.config = &rest.Config{Host: url, BearerToken: token, QPS: 200, Burst: 400, TLSClientConfig: rest.TLSClientConfig{
		CAFile: ca}}
	c.kubeconfig = filepath.Join(c.dir, "kubeconfig")
	k := clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: url, CertificateAuthority: ca}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"c": {Token: token}},
		Contexts:       map[string]*clientcmdapi.Context{"c": {Cluster: "c", AuthInfo: "c"}},
		CurrentContext: "c",
	}
	if err := clientcmd.WriteToFile(k, c.kubeconfig); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the API server is ready", func(ctx context.Context) error {
		for _, p := range c.processes {
			select {
			case <-p.done:
				t.Fatalf("%s ended: %s", p.name, tail(p.log))
			default:
			}
		}
		client, err := kubernetes.NewForConfig(c.config)
		if err != nil {
			return err
		}
		c.client = client
		return client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
	var err error
	if c.objects, err = dynamic.NewForConfig(c.config); err != nil {
		t.Fatal(err)
	}
}

// define makes the kinds that cert-manager and the Prometheus operator bring: those of cert-manager as its module has
// them, those of the operator as they follow from its types.
func (c *cluster) define(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	dir := strings.TrimSpace(
		output(t, exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/cert-manager/cert-manager")))
	files, err := filepath.Glob(filepath.Join(dir, "deploy/crds/*.yaml"))
	if err != nil || len(files) < 6 {
		t.Fatalf("%d files of kinds in %s, want 6: %v", len(files), dir, err)
	}
	generated := filepath.Join(c.dir, "crds")
	output(t, exec.Command("go", "tool", "controller-gen", "crd:ignoreUnexportedFields=true,maxDescLen=0",
		"paths=github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1", "output:crd:dir="+generated))
	for _, kind := range []string{"podmonitors", "prometheusrules"} {
		files = append(files, filepath.Join(generated, "monitoring.coreos.com_"+kind+".yaml"))
	}
	client, err := extensionsclient.NewForConfig(c.config)
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var crd extensions.CustomResourceDefinition
		if err := yaml.Unmarshal(b, &crd); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if _, err := client.ApiextensionsV1().CustomResourceDefinitions().Create(ctx, &crd,
			meta.CreateOptions{}); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		eventually(t, crd.Name+" is served", func(ctx context.Context) error {
			got, err := client.ApiextensionsV1().CustomResourceDefinitions().Get(ctx, crd.Name, meta.GetOptions{})
			if err != nil {
				return err
			}
			for _, s := range got.Status.Conditions {
				if s.Type == extensions.Established && s.Status == extensions.ConditionTrue {
					return nil
				}
			}
			return fmt.Errorf("conditions %v", got.Status.Conditions)
		})
	}
}

// furnish makes machines in two racks, with room for all values of the render tests, and classes of volumes.
func (c *cluster) furnish(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	for i := range 6 {
		room := core.ResourceList{
			"cpu": resource.MustParse("64"), "memory": resource.MustParse("4Ti"), "pods": resource.MustParse("200"),
			"hugepages-2Mi": resource.MustParse("64Gi"), "rdma/hca_shared_devices_a": resource.MustParse("4"),
		}
		node := &core.Node{
			ObjectMeta: meta.ObjectMeta{Name: fmt.Sprintf("machine-%d", i), Labels: map[string]string{
				"rack": fmt.Sprint(1 + i%2)}}}
		node.Labels["kubernetes.io/hostname"] = node.Name
		if i < 2 {
			node.Labels["kvd/lends"] = "true"
			node.Spec.Taints = []core.Taint{{Key: "kvd/lends", Value: "true", Effect: core.TaintEffectNoSchedule}}
		}
		address := core.NodeAddress{Type: core.NodeInternalIP, Address: fmt.Sprintf("192.0.2.%d", 10+i)}
		node.Status = core.NodeStatus{Capacity: room, Allocatable: room, Addresses: []core.NodeAddress{
			address, {Type: core.NodeHostName, Address: node.Name}}}
		if _, err := c.client.CoreV1().Nodes().Create(ctx, node, meta.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	late := storage.VolumeBindingWaitForFirstConsumer
	for name, annotations := range map[string]map[string]string{
		"standard": {"storageclass.kubernetes.io/is-default-class": "true"}, "fast": nil} {
		class := &storage.StorageClass{ObjectMeta: meta.ObjectMeta{Name: name, Annotations: annotations},
			Provisioner: "kvd.test/volumes", VolumeBindingMode: &late}
		if _, err := c.client.StorageV1().StorageClasses().Create(ctx, class, meta.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	loop, stop := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ; loop.Err() == nil; wait(loop, 200*time.Millisecond) {
			if err := errors.Join(c.provision(loop), c.balance(loop)); err != nil && loop.Err() == nil {
				t.Errorf("volumes and addresses: %v", err)
				return
			}
		}
	}()
	t.Cleanup(func() { stop(); <-ended })
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// provision makes a volume for every claim whose pod has a machine, as a driver would.
func (c *cluster) provision(ctx context.Context) error {
	claims, err := c.client.CoreV1().PersistentVolumeClaims("").List(ctx, meta.ListOptions{})
	if err != nil {
		return err
	}
	for _, claim := range claims.Items {
		machine := claim.Annotations["volume.kubernetes.io/selected-node"]
		if claim.Spec.VolumeName != "" || machine == "" {
			continue
		}
		name := "volume-" + string(claim.UID)
		volume := &core.PersistentVolume{ObjectMeta: meta.ObjectMeta{Name: name}, Spec: core.PersistentVolumeSpec{
			Capacity: claim.Spec.Resources.Requests, AccessModes: claim.Spec.AccessModes,
			ClaimRef: &core.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1",
				Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID},
			PersistentVolumeSource: core.PersistentVolumeSource{
				HostPath: &core.HostPathVolumeSource{Path: "/volumes/" + name}},
		}}
		if claim.Spec.StorageClassName != nil {
			volume.Spec.StorageClassName = *claim.Spec.StorageClassName
		}
		if _, err := c.client.CoreV1().PersistentVolumes().Create(ctx, volume, meta.CreateOptions{}); err != nil &&
			!apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	return nil
}

// balance gives every Service that wants a load balancer an address, as a cloud would.
func (c *cluster) balance(ctx context.Context) error {
	services, err := c.client.CoreV1().Services("").List(ctx, meta.ListOptions{})
	if err != nil {
		return err
	}
	for _, s := range services.Items {
		if s.Spec.Type != core.ServiceTypeLoadBalancer || len(s.Status.LoadBalancer.Ingress) > 0 ||
			s.DeletionTimestamp != nil {
			continue
		}
		s.Status.LoadBalancer.Ingress = []core.LoadBalancerIngress{{IP: "192.0.2.1"}}
		if _, err := c.client.CoreV1().Services(s.Namespace).UpdateStatus(ctx, &s, meta.UpdateOptions{}); err != nil &&
			!apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// eventually waits until f has no error.
func eventually(t *testing.T, what string, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var last error
	for ; ctx.Err() == nil; wait(ctx, 100*time.Millisecond) {
		err := f(ctx)
		if err == nil {
			return
		}
		if ctx.Err() == nil {
			last = err // and not that there was no time left
		}
	}
	t.Fatalf("%s: not within two minutes: %v", what, last)
}

// output is what a command prints.
func output(t *testing.T, c *exec.Cmd) string {
	t.Helper()
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	if err := c.Run(); err != nil {
		t.Fatalf("%v: %v\n%s", c.Args, err, &errs)
	}
	return out.String()
}
