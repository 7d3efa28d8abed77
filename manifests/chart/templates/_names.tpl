{{/* Labels of every object. */}}
{{- define "quartermaster.labels" -}}
app.kubernetes.io/name: quartermaster
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* What selects the pods of a component: (list . "agent"). Never more than this: a selector can't be changed. */}}
{{- define "quartermaster.selector" -}}
app.kubernetes.io/name: quartermaster
app.kubernetes.io/component: {{ last . }}
{{- end }}

{{/* An image by digest, else by tag: (list . .Values.agent.image). */}}
{{- define "quartermaster.image" -}}
{{- $image := last . }}
{{- $tag := $image.tag | default (first .).Chart.AppVersion }}
{{- if $image.digest }}
{{- printf "%s:%s@%s" $image.repository $tag $image.digest }}
{{- else }}
{{- printf "%s:%s" $image.repository $tag }}
{{- end }}
{{- end }}

{{/* Objects of files/, which kustomize takes too, in the release's namespace. */}}
{{- define "quartermaster.file" -}}
{{- (first .).Files.Get (last .) | replace "namespace: quartermaster\n" (printf "namespace: %s\n" (first .).Release.Namespace) }}
{{- end }}

{{/* The coordinator's flags, one for each setting that is set. */}}
{{- define "quartermaster.flags" -}}
- {{ printf "--auto-provision=%v" .Values.kwasmOperator.autoProvision | quote }}
{{- range $name, $value := .Values.coordinator.settings }}
{{- if kindIs "slice" $value }}
{{- $value = join "," $value | default nil }}
{{- else if kindIs "float64" $value }}
{{- /* Else a large number is written with an exponent. */}}
{{- $value = int64 $value }}
{{- end }}
{{- if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%v" (kebabcase $name) $value | quote }}
{{- end }}
{{- end }}
{{- end }}
