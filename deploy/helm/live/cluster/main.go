// Cluster is the control plane of Kubernetes as one program. Its first argument makes it one of these: etcd,
// kube-apiserver, kube-controller-manager, kube-scheduler, kwok (machines that there are none of) or cert-manager. Each
// is what its project ships, and takes the flags that it takes there. cert-manager is the exception: its own main
// package is in no module that can be required.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/cert-manager/cert-manager/pkg/controller"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/approver"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/ca"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/selfsigned"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/issuing"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/keymanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/readiness"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/requestmanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/revisionmanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/trigger"
	_ "github.com/cert-manager/cert-manager/pkg/controller/clusterissuers"
	_ "github.com/cert-manager/cert-manager/pkg/controller/issuers"
	_ "github.com/cert-manager/cert-manager/pkg/issuer/ca"
	_ "github.com/cert-manager/cert-manager/pkg/issuer/selfsigned"
	"github.com/spf13/pflag"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	"sigs.k8s.io/kwok/pkg/config"
	kwok "sigs.k8s.io/kwok/pkg/kwok/cmd"
	"sigs.k8s.io/kwok/pkg/log"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "cluster: name a program: etcd, kube-apiserver, kube-controller-manager, "+
			"kube-scheduler, kwok or cert-manager")
		os.Exit(2)
	}
	os.Args = os.Args[1:]
	switch os.Args[0] {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-controller-manager":
		os.Exit(cli.Run(controllers.NewControllerManagerCommand()))
	case "kube-scheduler":
		os.Exit(cli.Run(scheduler.NewSchedulerCommand()))
	case "kwok":
		run(machines)
	case "cert-manager":
		run(certManager)
	default:
		fmt.Fprintf(os.Stderr, "cluster: %q is none of its programs\n", os.Args[0])
		os.Exit(2)
	}
}

// run calls f until a signal ends its context.
func run(f func(context.Context) error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := f(ctx)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", os.Args[0], err)
		os.Exit(1)
	}
}

// machines is the main function of sigs.k8s.io/kwok/cmd/kwok.
func machines(ctx context.Context) error {
	// without --version of Kubernetes' programs, which is another one
	pflag.CommandLine = pflag.NewFlagSet("kwok", pflag.ContinueOnError)
	flags := pflag.NewFlagSet("global", pflag.ContinueOnError)
	flags.ParseErrorsAllowlist.UnknownFlags = true
	ctx, _ = log.InitFlags(ctx, flags)
	ctx, err := config.InitFlags(ctx, flags)
	if err != nil {
		return err
	}
	command := kwok.NewCommand(ctx)
	command.PersistentFlags().AddFlagSet(flags)
	return command.ExecuteContext(ctx)
}

// certManager runs all controllers that are imported, as cert-manager's own program does.
func certManager(ctx context.Context) error {
	flags := pflag.NewFlagSet("cert-manager", pflag.ContinueOnError)
	opts := controller.ContextOptions{KubernetesAPIQPS: 100, KubernetesAPIBurst: 200}
	flags.StringVar(&opts.Kubeconfig, "kubeconfig", "", "the API server, and who asks it")
	flags.StringVar(&opts.ClusterResourceNamespace, "cluster-resource-namespace", "cert-manager",
		"the namespace with Secrets of a ClusterIssuer")
	if err := flags.Parse(os.Args[1:]); err != nil {
		return err
	}
	opts.CertificateRequestMinimumBackoffDuration = time.Hour
	opts.CertificateRequestMaximumBackoffDuration = 32 * time.Hour
	factory, err := controller.NewContextFactory(ctx, opts)
	if err != nil {
		return err
	}
	made := map[string]controller.Interface{}
	for name, make := range controller.Known() {
		if made[name], err = make(factory); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	shared, err := factory.Build()
	if err != nil {
		return err
	}
	shared.SharedInformerFactory.Start(ctx.Done())
	shared.KubeSharedInformerFactory.Start(ctx.Done())
	var wg sync.WaitGroup
	failed := make(chan error, len(made))
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	for name, c := range made {
		wg.Go(func() {
			if err := c.Run(5, ctx); err != nil {
				failed <- fmt.Errorf("%s: %w", name, err)
				stop()
			}
		})
	}
	wg.Wait()
	select {
	case err := <-failed:
		return err
	default:
		return nil
	}
}
