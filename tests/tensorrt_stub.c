/* Stands for libnvinfer, libnvinfer_plugin and libnvonnxparser, so that TensorRT's Python bindings can be imported where
   the libraries are not installed. Every entry does nothing: no builder, no parser, no registry. */
#define NOTHING(name) void *name(void) { return 0; }
NOTHING(createInferBuilder_INTERNAL)
NOTHING(createInferRefitter_INTERNAL)
NOTHING(createInferRuntime_INTERNAL)
NOTHING(createNvOnnxParserRefitter_INTERNAL)
NOTHING(createNvOnnxParser_INTERNAL)
NOTHING(getBuilderPluginRegistry)
NOTHING(getPluginRegistry)
int getNvOnnxParserVersion(void) { return 0; }
int initLibNvInferPlugins(void *logger, const char *name) { return 1; }
