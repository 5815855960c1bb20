{{- define "penstock.name" -}}
{{- if contains "penstock" .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-penstock" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "penstock.variant" -}}
{{- if .Values.gpu.enabled }}{{ .Values.gpu.variant }}{{ else }}cpu{{ end -}}
{{- end -}}

{{/* The name of the secret; empty if there is none. */}}
{{- define "penstock.secret" -}}
{{- if .Values.existingSecret -}}
{{- .Values.existingSecret -}}
{{- else if or .Values.apiKeys .Values.hubToken -}}
{{- include "penstock.name" . -}}
{{- end -}}
{{- end -}}

{{/* Whether requests must bring a key; empty if not. */}}
{{- define "penstock.asksForKeys" -}}
{{- if or .Values.apiKeys (and .Values.existingSecret .Values.existingSecretHasKeys) -}}
yes
{{- end -}}
{{- end -}}

{{/* A value as text. Helm has whole numbers as floats, and would write large ones with an exponent. */}}
{{- define "penstock.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* The names by which clients ask for the pods: the service's, the ingress's, and those of allowedHosts. */}}
{{- define "penstock.hosts" -}}
{{- $name := include "penstock.name" . -}}
{{- $space := .Release.Namespace -}}
{{- $own := list $name (printf "%s.%s" $name $space) (printf "%s.%s.svc" $name $space) (printf "%s.%s.svc.cluster.local" $name $space) -}}
{{- concat $own .Values.ingress.hosts .Values.allowedHosts | uniq | join "," -}}
{{- end -}}

{{- define "penstock.isShared" -}}
{{- if or (not .Values.persistence.enabled) .Values.persistence.existingClaim (has "ReadWriteMany" .Values.persistence.accessModes) -}}
yes
{{- end -}}
{{- end -}}
