{{- define "tollgate.name" -}}
{{ .Values.nameOverride | default .Chart.Name }}
{{- end }}

{{- /* The name of each object, some of which add an ending. A Service's name has 63 characters at most. */}}
{{- define "tollgate.fullname" -}}
{{- $name := include "tollgate.name" . }}
{{- $both := printf "%s-%s" .Release.Name $name }}
{{- if contains $name .Release.Name }}{{ $both = .Release.Name }}{{ end }}
{{- .Values.fullnameOverride | default $both | trunc 63 | trimAll "-" }}
{{- end }}

{{- /* The Secret for redis.url and tokens.list, and not tollgate, which redis.existingSecret is by default. */}}
{{- define "tollgate.own" -}}
{{ include "tollgate.fullname" . }}-own-{{ int .Values.secretVersion }}
{{- end }}

{{- define "tollgate.selector" -}}
app.kubernetes.io/name: {{ include "tollgate.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tollgate.labels" -}}
{{ include "tollgate.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}
