{{- define "djinn.name" -}}
{{- if contains "djinn" .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-djinn" (.Release.Name | trunc 46 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "djinn.selector" -}}
app.kubernetes.io/name: djinn
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "djinn.labels" -}}
{{ include "djinn.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "djinn.tokens" -}}
{{- if .Values.tokens.secretName }}{{ .Values.tokens.secretName }}{{ else }}{{ include "djinn.name" . }}-tokens{{ end }}
{{- end }}

{{- define "djinn.image" -}}
{{ required "image.repository is not set: build an image from packaging/Containerfile and push it to a registry of yours" .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
