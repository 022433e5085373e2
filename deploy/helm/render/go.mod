module github.com/kvd-project/kvd/deploy/helm/render

go 1.26.7

require (
	github.com/cert-manager/cert-manager v1.21.2 // indirect
	github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring v0.95.1 // indirect
	go.yaml.in/yaml/v2 v2.4.4 // indirect
	helm.sh/helm/v3 v3.22.0 // indirect
	k8s.io/api v0.37.2 // indirect
	k8s.io/apimachinery v0.37.2 // indirect
	k8s.io/pod-security-admission v0.37.2 // indirect
	sigs.k8s.io/yaml v1.6.0 // indirect
)
