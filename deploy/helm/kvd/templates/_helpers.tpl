{{- define "kvd.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "kvd.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "kvd.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "kvd.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kvd.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}

{{/* kvd.selector: (dict "root" $ "role" "directory") */}}
{{- define "kvd.selector" -}}
app.kubernetes.io/name: {{ include "kvd.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "kvd.labels" -}}
{{ include "kvd.selector" . }}
app.kubernetes.io/version: {{ default .root.Chart.AppVersion .root.Values.image.tag | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: kvd
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "kvd.secure" -}}
{{- if ne .Values.tls.mode "none" }}true{{ end }}
{{- end }}

{{- define "kvd.scheme" -}}
{{- if include "kvd.secure" . }}https{{ else }}http{{ end }}
{{- end }}

{{- define "kvd.trustDomain" -}}
{{- default (printf "%s.%s" .Release.Namespace .Values.clusterDomain) .Values.tls.trustDomain }}
{{- end }}

{{/* kvd.secret: (dict "root" $ "role" "directory"), the Secret of a role's certificate */}}
{{- define "kvd.secret" -}}
{{- if eq .root.Values.tls.mode "secrets" }}
{{- $name := get .root.Values.tls.secrets .role }}
{{- if and (not $name) (eq .role "janitor") }}{{ $name = .root.Values.tls.secrets.memnode }}{{ end }}
{{- required (printf "tls.secrets.%s: name the Secret with ca.crt, tls.crt and tls.key of the role %s" .role .role) $name }}
{{- else }}
{{- include "kvd.fullname" .root }}-{{ .role }}-tls
{{- end }}
{{- end }}

{{/* kvd.directoryHosts: every directory node's name */}}
{{- define "kvd.directoryAddresses" -}}
{{- $name := include "kvd.fullname" . }}
{{- $hosts := list }}
{{- range $i := until (int .Values.directory.replicas) }}
{{- $hosts = append $hosts (printf "%s-directory-%d.%s-directory.%s.svc:7400" $name $i $name $.Release.Namespace) }}
{{- end }}
{{- join "," $hosts }}
{{- end }}

{{/* kvd.env: settings as the environment has them. (dict "root" $ "settings" (dict ...)) Pod fields first, since others refer to them. */}}
{{- define "kvd.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- range $key, $value := .settings }}
- name: KVD_{{ $key | upper | replace "-" "_" | replace "." "_" }}
  value: {{ if kindIs "slice" $value }}{{ join "," $value | quote }}{{ else }}{{ $value | toString | quote }}{{ end }}
{{- end }}
{{- end }}

{{/* kvd.tlsSettings: a dict of settings as YAML */}}
{{- define "kvd.tlsSettings" -}}
{{- if include "kvd.secure" . }}
tls.ca: /tls/ca.crt
tls.cert: /tls/tls.crt
tls.key: /tls/tls.key
{{- with .Values.tls.serverName }}
tls.server-name: {{ . }}
{{- end }}
identity.trust-domain: {{ include "kvd.trustDomain" . }}
{{- else }}
insecure: "true"
{{- end }}
{{- end }}

{{/* kvd.kvctlSettings: the same for kvctl, whose variables have no sections */}}
{{- define "kvd.kvctlSettings" -}}
directory: {{ include "kvd.directoryAddresses" . }}
{{ include "kvd.tlsSettings" . }}
{{- end }}

{{/* kvd.health: the command of a probe, by its http-listen port */}}
{{- define "kvd.health" -}}
exec:
  command: [/kvd, health, "{{ include "kvd.scheme" .root }}://127.0.0.1:{{ .port }}", --timeout=3s]
{{- end }}

{{- define "kvd.alive" -}}
exec:
  command: [/kvd, health, "{{ include "kvd.scheme" .root }}://127.0.0.1:{{ .port }}/healthz", --timeout=3s]
{{- end }}

{{/* kvd.podSecurity: the standard "restricted" */}}
{{- define "kvd.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* kvd.containerSecurity: (dict "capabilities" (list ...)) */}}
{{- define "kvd.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- with .capabilities }}
  add: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "kvd.tlsMount" -}}
{{- if include "kvd.secure" . }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- end }}

{{/* kvd.tlsVolume: (dict "root" $ "role" "directory") */}}
{{- define "kvd.tlsVolume" -}}
{{- if include "kvd.secure" .root }}
- name: tls
  secret: {secretName: {{ include "kvd.secret" . }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* kvd.placement: (dict "root" $ "role" "gateway" "of" .Values.gateway) */}}
{{- define "kvd.placement" -}}
{{- with .of.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- if .of.affinity }}
affinity: {{ toJson .of.affinity }}
{{- else }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "kvd.selector" . | nindent 14 }}
{{- end }}
{{- end }}

{{/* kvd.mebibytes: a quantity in Mi, Gi or Ti as a number of MiB */}}
{{- define "kvd.mebibytes" -}}
{{- $n := regexFind "^[0-9]+" (toString .) | int }}
{{- if hasSuffix "Ti" (toString .) }}{{ mul $n 1048576 }}
{{- else if hasSuffix "Gi" (toString .) }}{{ mul $n 1024 }}
{{- else if hasSuffix "Mi" (toString .) }}{{ $n }}
{{- else }}{{ fail (printf "%v: want a whole number of Mi, Gi or Ti" .) }}{{ end }}
{{- end }}
